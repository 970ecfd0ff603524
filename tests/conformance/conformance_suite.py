"""Runs cases with known right answers against any framework, through an adapter; needs only the standard library.

A case is data (`cases/*.json`); the README beside this file describes its fields and the vocabulary of functions.
An adapter is any object with `call(function, inputs, params) -> dict[str, value]`: nested lists of numbers in, nested
lists (or numbers, bools) out. It raises `Unsupported` for what the framework does not have; any other exception is the
framework refusing the input.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CASES = Path(__file__).parent / "cases"
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Unsupported(Exception):
    """The framework behind the adapter has no such function or option."""


class Adapter(Protocol):
    """Binds the suite's names to one framework."""

    name: str

    def call(self, function: str, inputs: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Case:
    id: str
    function: str
    source: str
    says: str
    inputs: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, Any] = field(default_factory=dict)
    finite: tuple[str, ...] = ()
    at_most: dict[str, float] = field(default_factory=dict)
    raises: bool = False
    tolerance: float = 1e-6
    choice: str = ""


def decode(value: Any) -> Any:
    """Numbers that JSON lacks ("nan", "inf", "-inf") and `{"repeat": [value, times]}` to plain Python."""
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict) and set(value) == {"repeat"}:
        item, times = value["repeat"]
        return [decode(item)] * times
    return value


def load_cases(folder: Path = CASES) -> list[Case]:
    """All cases, in order of file and place. Raises ValueError for two of one id."""
    cases: list[Case] = []
    for path in sorted(folder.glob("*.json")):
        for raw in json.loads(path.read_text()):
            raw["inputs"] = {k: decode(v) for k, v in raw.get("inputs", {}).items()}
            raw["expect"] = {k: decode(v) for k, v in raw.get("expect", {}).items()}
            raw["finite"] = tuple(raw.get("finite", ()))
            cases.append(Case(**raw))
    ids = [c.id for c in cases]
    if len(set(ids)) < len(ids):
        raise ValueError(f"case ids given twice: {sorted({i for i in ids if ids.count(i) > 1})}")
    return cases


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, list | tuple) else [value]


def _shape(value: Any) -> Any:
    return [_shape(v) for v in value] if isinstance(value, list | tuple) else None


def _same(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, bool) or isinstance(want, str):
        return got == want
    got, want = float(got), float(want)
    if math.isnan(want) or math.isinf(want):
        return math.isnan(got) if math.isnan(want) else got == want
    return abs(got - want) <= tolerance * max(1.0, abs(want))


def run(case: Case, adapter: Adapter, *, partly: bool = False) -> list[str]:
    """What is wrong, one line each; nothing if the case passes. Raises Unsupported where the adapter does.

    `partly` accepts an adapter that gives only some of the outputs and compares those; Unsupported if it gives none.
    """
    try:
        out = adapter.call(case.function, case.inputs, case.params)
    except Unsupported:
        raise
    except Exception as error:
        return [] if case.raises else [f"raised {type(error).__name__}: {error}"]
    if case.raises:
        return [f"was not refused, gave {out}"]
    asked = {*case.expect, *case.finite, *case.at_most}
    missing = asked - set(out)
    if missing and partly and missing == asked:
        raise Unsupported(f"outputs {', '.join(sorted(missing))}")
    wrong = [] if partly else [f"{name}: not given" for name in sorted(missing)]
    for name, want in case.expect.items():
        if name in missing:
            continue
        got = out[name]
        if _shape(got) != _shape(want):
            wrong.append(f"{name}: shape of {got} is not that of {want}")
        elif not all(_same(g, w, case.tolerance) for g, w in zip(_flat(got), _flat(want), strict=True)):
            wrong.append(f"{name}: {got}, right is {want}")
    for name in set(case.finite) - missing:
        if not all(math.isfinite(x) for x in _flat(out[name])):
            wrong.append(f"{name}: {out[name]} is not finite")
    for name, limit in case.at_most.items():
        if name not in missing and not all(x <= limit for x in _flat(out[name])):
            wrong.append(f"{name}: {out[name]} is above {limit}")
    return wrong
