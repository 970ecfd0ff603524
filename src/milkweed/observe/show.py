"""Trajectories for people: turns, tool calls, rewards, and each sampled token coloured by what it was worth or how
likely it was. On a terminal (`milkweed show DIR`) and in a notebook (`mw.show(trajectory, chat)`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.panel import Panel
from rich.style import Style
from rich.text import Text

from milkweed.data.tokenizer import Chat
from milkweed.errors import DataError
from milkweed.types import Trajectory

Colour = Literal["advantage", "logprob", "difference"]


class Shown:
    """What `show` returns: prints itself with rich, and as HTML in a notebook."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __rich__(self) -> Any:
        return self._body

    def _repr_html_(self) -> str:
        console = Console(record=True, file=io.StringIO(), width=110, force_jupyter=False)
        console.print(self._body)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.3">{code}</pre>')


def show(
    trajectory: Trajectory,
    chat: Chat,
    *,
    advantage: float | Sequence[float] | None = None,
    logprobs: Sequence[float] | Callable[[Trajectory], Sequence[float] | None] | None = None,
    title: str = "",
) -> Shown:
    """`trajectory` turn by turn. Sampled tokens are coloured by `advantage` (green above 0, red below; one number, or
    one a token), else by the difference between `logprobs` (the trainer's, one a token of `token_ids`, or a function that
    gives those of a sequence) and the engine's, else by the engine's log-prob (the redder, the less likely). Segments
    are shown first, coloured by a function only."""
    parts: list[Any] = []
    worst = -1.0
    for number, s in enumerate(trajectory.sequences):
        last = s is trajectory
        theirs = logprobs(s) if callable(logprobs) else logprobs if last else None
        values, colour = _values(s, advantage if last else None, theirs)
        if colour == "difference":
            sampled = [v for v, m in zip(values, s.loss_mask, strict=True) if m]
            worst = max([worst, *sampled])
        if len(trajectory.sequences) > 1:
            parts.append(Text(f"segment {number + 1} of {len(trajectory.sequences)}", style="bold"))
        parts += [line for turn in s.turns for line in _turn(s, turn, chat, values, colour)]
    reward = "not scored" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    told = [reward, *(f"{k} {v:g}" for k, v in trajectory.reward_parts.items()), trajectory.finish_reason]
    told += [f"{trajectory.sampled} tokens sampled", f"weights {trajectory.version}"]
    if worst >= 0:
        told.append(f"trainer and engine differ by {worst:.2g} at most")
    if trajectory.dropped:
        told.append(f"dropped: {trajectory.dropped}")
    name = " ".join(p for p in (title, trajectory.id, trajectory.agent) if p)
    return Shown(
        Panel(Group(*parts), title=name or None, title_align="left", subtitle=", ".join(told), subtitle_align="left")
    )


def _values(
    t: Trajectory, advantage: float | Sequence[float] | None, logprobs: Sequence[float] | None
) -> tuple[Sequence[float], Colour]:
    n = len(t.token_ids)
    if advantage is not None:
        return ([float(advantage)] * n if isinstance(advantage, (int, float)) else advantage), "advantage"
    if logprobs is not None:
        if len(logprobs) != n:
            raise DataError(f"show: {len(logprobs)} log-probs for {n} tokens")
        return [abs(a - b) for a, b in zip(logprobs, t.logprobs, strict=True)], "difference"
    return t.logprobs, "logprob"


def _turn(t: Trajectory, turn: Any, chat: Chat, values: Sequence[float], colour: Colour) -> list[Any]:
    head = Text(turn.role, style="bold cyan" if turn.role == "assistant" else "bold")
    if turn.reward is not None:
        head.append(f"  reward {turn.reward:g}", style="magenta")
    body = Text()
    i = turn.start
    while i < turn.end:
        end = i + 1
        text = chat.decode(t.token_ids[i:end], skip_special_tokens=False)
        while "\ufffd" in text and end < min(turn.end, i + 4):  # a letter of several tokens
            end += 1
            text = chat.decode(t.token_ids[i:end], skip_special_tokens=False)
        body.append(text.translate(_CONTROLS), style=_style(values[i], colour) if t.loss_mask[i] else Style(dim=True))
        i = end
    return [head, body]


_CONTROLS = {c: chr(0x2400 + c) for c in range(32) if c != 10} | {127: "\u2421"}
"""What a policy says must not steer the terminal."""


def _style(value: float, colour: Colour) -> Style:
    if colour == "advantage":
        depth = min(1.0, abs(value))
        if depth < 0.01:
            return Style()
        low = int(220 * (1 - depth))
        return Style(color=f"rgb({low},200,{low})" if value > 0 else f"rgb(230,{low},{low})")
    # a difference of 0.1, or a token of probability e^-5, is as red as it gets
    depth = min(1.0, value / 0.1 if colour == "difference" else -value / 5.0)
    return Style() if depth < 0.02 else Style(color=f"rgb(230,{int(220 * (1 - depth))},{int(220 * (1 - depth))})")


def show_run(
    folder: Path,
    *,
    step: int | None = None,
    group: str = "",
    most: int = 4,
    colour: str = "advantage",
    console: Console | None = None,
) -> int:
    """Prints trajectories from the ledger of the run in `folder`: those that `step` trained (default: the last), or
    those of `group`. Returns how many. Raises DataError where the run holds no such."""
    from milkweed.data.ledger.records import unpack_trajectory
    from milkweed.data.ledger.schema import read_index
    from milkweed.data.ledger.segments import Segments
    from milkweed.observe.trained import read_trained
    from milkweed.runs.directory import read_record

    record = read_record(folder)
    chat = Chat(record.config["model"])
    index = read_index(folder / "ledger")
    try:
        if group:
            where, value = "i.name = ?", group
        else:
            last = index.execute("SELECT max(step) FROM trained WHERE lost=0").fetchone()[0]
            where, value = (
                "i.number IN (SELECT number FROM trained WHERE lost=0 AND step = ?)",
                step if step is not None else last,
            )
        rows = index.execute(
            f"SELECT i.number, i.name, f.segment, f.offset FROM issued i JOIN finished f ON f.number=i.number WHERE {where} ORDER BY i.number, f.sample",
            (value,),
        ).fetchall()
    finally:
        index.close()
    trained = None
    if colour == "difference":
        if group:
            raise DataError("colours by difference are of a step's batch: say --step, not --group")
        trained = read_trained(folder, value)
    if not rows:
        raise DataError(f"{folder}: its ledger has no trajectory of {f'group {group}' if group else f'step {value}'}")
    segments, console = Segments(folder / "ledger" / "segments"), console or Console(highlight=False)
    found: dict[str, list[Trajectory]] = {}
    try:
        for _, name, segment, offset in rows:
            found.setdefault(name, []).append(unpack_trajectory(segments.read(segment, offset)))
    finally:
        segments.close()
    shown = 0
    for name, trajectories in found.items():
        rewards = [t.reward for t in trajectories if t.reward is not None and t.dropped is None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        for t in trajectories:
            if shown == most:
                console.print(f"... {len(rows) - shown} more (--n)")
                return shown
            worth = None if colour != "advantage" or t.reward is None else t.reward - mean
            theirs = None if trained is None else lambda s: trained.of(s.token_ids)
            console.print(show(t, chat, advantage=worth, logprobs=theirs, title="" if t.id else name))
            shown += 1
    return shown
