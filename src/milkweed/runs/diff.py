"""Where two runs part: the first step and quantity that differ, from their ledgers and metrics."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milkweed.data.ledger.records import unpack_trajectory
from milkweed.data.ledger.schema import read_index
from milkweed.data.ledger.segments import Segments
from milkweed.errors import DataError
from milkweed.observe.metrics import read_metrics

TRAINER = ("loss", "grad_norm", "lr", "tokens")


class _Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder / "ledger")
        self.segments = Segments(folder / "ledger" / "segments")
        self.metrics = {r["step"]: r for r in read_metrics(folder) if "loss" in r}

    def samples(self, step: int) -> list[tuple[str, int, int]]:
        """`(group's name, group's number, sample)` in the order they were trained in."""
        query = "SELECT i.name, t.number, t.sample FROM trained t JOIN issued i USING (number) WHERE t.lost=0 AND t.step=? ORDER BY t.place"
        return self.index.execute(query, (step,)).fetchall()

    def quantities(self, step: int) -> Iterator[tuple[str, Any]]:
        """What the step was made of and what it gave, causes before effects."""
        samples = self.samples(step)
        yield "the order of its samples", [(name, sample) for name, _, sample in samples]
        for name, number, sample in samples:
            row = self.index.execute("SELECT segment, offset FROM finished WHERE number=? AND sample=?", (number, sample)).fetchone()
            try:
                t = unpack_trajectory(self.segments.read(*row))
            except DataError:
                continue  # retention took its tokens away
            for field in ("token_ids", "logprobs", "loss_mask", "reward"):
                yield f"{field} of sample {name}/{sample}", getattr(t, field)
        for key in TRAINER:
            yield key, self.metrics.get(step, {}).get(key)


def diff(one: str | Path, other: str | Path) -> str | None:
    """The first step and quantity in which two runs part, in words; None where all steps that both have are equal to the
    bit. Raises DataError where a folder holds no ledger."""
    runs = _Run(Path(one)), _Run(Path(other))
    try:
        steps = [r.index.execute("SELECT max(step) FROM steps").fetchone()[0] or 0 for r in runs]
        for step in range(1, min(steps) + 1):
            for (name, a), (name_b, b) in zip(*(r.quantities(step) for r in runs)):
                if name == name_b and a != b:
                    return f"step {step}: {name}: {_apart(a, b)}"
        return None
    except sqlite3.DatabaseError as error:
        raise DataError(f"{one} or {other} cannot be read: {error}") from error
    finally:
        for run in runs:
            run.index.close()


def _apart(a: Any, b: Any) -> str:
    if isinstance(a, list) and isinstance(b, list):
        for n, (x, y) in enumerate(zip(a, b)):
            if x != y:
                return f"entry {n} is {json.dumps(x)} and {json.dumps(y)}"
        return f"{len(a)} entries and {len(b)}"
    return f"{a!r} and {b!r}"
