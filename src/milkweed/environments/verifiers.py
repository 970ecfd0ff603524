r"""Verifiers: how right a completion is, as a number between 0 and 1. Plain functions `(completion, answer) -> float`.

A completion that is None or empty answers nothing and is worth 0; a reference answer that is None is a fault of the
data, and raises ValueError.

`by_answer(verifier)` makes a reward of one, for `single_turn`:

>>> env = single_turn(by_answer(mathematical))
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from milkweed.environments.extract import NUMBER, answer_in, last_box, level, said
from milkweed.environments.maths import close_decimal, given_reference, math_equal, mathematical, number
from milkweed.types import Prompt

Verifier = Callable[..., float]


def exact(completion: str | None, answer: Any, *, ignore_case: bool = False) -> float:
    """1.0 where the completion is the answer, but for Unicode forms, line ends and white space around each line's end
    and around the whole."""

    def plain(value: Any) -> str:
        text = unicodedata.normalize("NFC", str(value)).replace("\r\n", "\n").replace("\r", "\n")
        text = "\n".join(line.rstrip() for line in text.split("\n")).strip()
        return text.casefold() if ignore_case else text

    want = plain(given_reference(answer))
    return float(bool(want) and completion is not None and plain(completion) == want)


def numeric(completion: str | None, answer: Any, *, relative: float = 0.0, absolute: float = 0.0) -> float:
    r"""1.0 where the number that the completion gives (boxed, after "answer", or the last one) equals `answer`.

    Numbers are compared as exact fractions: 1,000 = 1000 = 1e3, 50% = 0.5 = 1/2 = \frac12, with currency signs and
    units left aside. A decimal of six or more significant digits also stands for what it rounds. `relative` and
    `absolute` widen that: right where the difference is within either.
    Raises ValueError where `answer` is not a number.
    """
    want = _number(str(answer))
    if want is None:
        raise ValueError(f"the reference {answer!r} is not a number")
    text = answer_in(completion)
    if text is None:
        return 0.0
    got = _number(text)
    if got is None:
        found = list(NUMBER.finditer(level(text)))
        text = found[-1].group(0) if found else ""
        got = _number(text)
    if got is None:
        return 0.0
    error = abs(got - want)
    wide = max(Fraction(relative) * abs(want), Fraction(absolute))
    return float(error <= wide or close_decimal(text, error) or close_decimal(str(answer), error))


def _number(text: str) -> Fraction | None:
    text = level(text)
    text = re.sub(r"^\s*\\?[A-Za-z]+\s*=\s*", "", text)
    text = re.sub(r"^([-+]?)\s*(?:\\?\$|€|£|¥)\s*", r"\1", text)
    percent = re.search(r"\s*(?:\\?%|\bpercent\b)\s*$", text, re.IGNORECASE)
    if percent:
        text = text[: percent.start()]
    value = number(text)
    if value is None:
        bare = re.fullmatch(r"(.*\d)\s*(?:[A-Za-z°€£¥$\\][^\d]*)", text)
        value = number(bare.group(1)) if bare else None
    return value / 100 if value is not None and percent else value


def multiple_choice(completion: str | None, answer: Any, *, choices: Sequence[str] = "ABCDEFGHIJ") -> float:
    r"""1.0 where the completion chooses the letter `answer`: `\boxed{\text{E}}`, `(E)`, `**E.** because`, `E) 12`,
    `The answer is E`. The last choice that is marked as one counts; letters in the prose around it do not."""
    want = _letter(str(answer), choices, whole=True)
    if want is None:
        raise ValueError(f"the reference {answer!r} is none of the choices {', '.join(choices)}")
    return float(_chosen(completion, choices) == want)


_STRAIGHT = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


def _chosen(completion: str | None, choices: Sequence[str]) -> str | None:
    text = said(completion).translate(_STRAIGHT)
    box = last_box(text)
    if box is not None:
        return _letter(box, choices)
    letters = "|".join(re.escape(c) for c in choices)
    # a choice stands alone: brackets, stars or a point around it, never a letter or an apostrophe
    alone = rf"(?:\*\*|__)?[(\[\"'`$]?(?:\\text\{{)?(?P<c>{letters})(?![A-Za-z0-9'’])"
    lead = r"(?i:option|choice|choose|select|pick|answer)"
    said_so = rf"{lead}(?i:\s*(?:is|are|:|=|option|choice|would be|must be|\*|\s)+)\s*"
    marked = list(re.finditer(rf"{said_so}(?:{alone}|(?i:(?P<small>{letters}))(?=[\s.)*]*(?:$|\n)))", text))
    if marked:
        more = rf"[)\]*.\s]*(?:or|and|/|,|&)\s*[(\[*]*(?:{letters})(?![A-Za-z0-9'’])"
        letter = marked[-1]["c"] or next(c for c in choices if c.casefold() == marked[-1]["small"].casefold())
        return None if re.match(more, text[marked[-1].end() :]) else letter
    for pattern in (rf"(?:\*\*|__)\s*[(\[]?(?P<c>{letters})[)\].:]?(?=[\s*_).:])", rf"\((?P<c>{letters})\)"):
        found = list(re.finditer(pattern, text))
        if found:
            return found[-1]["c"]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        start = re.match(rf"{alone}(?:[).\]:*\"'`$}}]+(?:\s|$)|\s+[-\u2013\u2014]\s|\s*$)", line)
        if start:
            return start["c"]
    end = re.search(rf"(?P<denied>(?:\b(?i:and|or|nor|not)|[,&/])\s*)?(?:^|(?<=[\s(*:,&/]))(?P<c>{letters})[).*]*$", text)
    if end:
        return None if end["denied"] else end["c"]
    return _letter(text, choices, whole=True)


def _letter(text: str, choices: Sequence[str], whole: bool = False) -> str | None:
    bare = level(text).strip(" ()[]{}.*:\"'`")
    exactly = next((c for c in choices if bare == c), None) or next(
        (c for c in choices if bare.casefold() == c.casefold()), None
    )
    if exactly or whole:
        return exactly
    start = re.match(r"[(\[]?\s*(\w+)\s*[).\]:]", level(text))
    return next((c for c in choices if start and start.group(1) == c), None)


def by_answer(verifier: Verifier, **options: Any) -> Callable[[Prompt, str], float]:
    """A reward `(prompt, completion)` that asks `verifier(completion, prompt.answer, **options)`."""

    def reward(prompt: Prompt, completion: str) -> float:
        return verifier(completion, prompt.answer, **options)

    reward.__name__ = reward.__qualname__ = getattr(verifier, "__name__", "verifier")
    if verifier in (mathematical, math_equal):
        reward.prepare = _import_symbolic  # type: ignore[attr-defined]
    return reward


def _import_symbolic() -> None:
    from milkweed.environments import symbolic

    symbolic.same("x^2", "x x")  # its grammar is built on first use: seconds on a busy machine


def reasoning_gym_score(prompt: Prompt, completion: str) -> float:
    """reasoning-gym's own score of a prompt from `data.from_reasoning_gym`: the data set's `score_answer`, given the
    text between the last `<answer>` tags, else the last box, else the whole completion, stripped. A reward."""
    task = prompt.info.get("reasoning_gym") if isinstance(prompt.info, dict) else None
    if task is None:
        raise ValueError(f"prompt {prompt.id} is not of reasoning-gym")
    tags = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    given = tags[-1] if tags else last_box(completion)
    data = _reasoning_gym(task["name"], json.dumps(task["config"], default=list, sort_keys=True))
    return float(data.score_answer((completion if given is None else given).strip(), task["entry"]))


@functools.lru_cache(maxsize=64)
def _reasoning_gym(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


def _import_reasoning_gym() -> None:
    import reasoning_gym  # noqa: F401


reasoning_gym_score.prepare = _import_reasoning_gym  # type: ignore[attr-defined]
