"""The live view of a run: on a terminal a panel that stays in place, elsewhere one line a step."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 48, low: float | None = None, high: float | None = None) -> str:
    """`values` as a row of bars, averaged down to `width` columns."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[max(0, min(len(_BARS) - 1, round((v - low) * scale)))] for v in values)


def duration(seconds: float) -> str:
    """75 -> "1:15"; 3675 -> "1:01:15"."""
    s = max(0, round(seconds))
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}" if s >= 3600 else f"{s // 60}:{s % 60:02}"


class View:
    """Shows progress. `update` is called once a step, `say` for anything else worth a line, `status` while waiting."""

    def __init__(self, title: str, steps: int, *, console: Console | None = None, live: bool | None = None):
        self.console = console or Console(highlight=False)
        self._live_wanted = self.console.is_terminal if live is None else live
        self._title, self._steps = title, steps
        self._rewards: list[float] = []
        self._held_out: list[tuple[int, float]] = []
        self._row: dict[str, Any] = {}
        self._status, self._status_since = "starting", time.monotonic()
        self._step, self._first, self._began = 0, None, time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> View:
        if self._live_wanted:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, soft_wrap=True, markup=False)

    def status(self, text: str) -> None:
        """What the run is waiting for now. Without a terminal it is a line of its own."""
        if text != self._status:
            self._status, self._status_since = text, time.monotonic()
            if self._live is None and text:
                self.say(text)

    def held_out(self, step: int, reward: float) -> None:
        self._held_out.append((step, reward))
        if self._live is None:
            self.say(f"step {step}: held-out reward {reward:.3f}")

    def update(self, step: int, row: dict[str, Any]) -> None:
        """`row` holds `reward`, `version`, `tokens_per_s` and the parts' seconds under `time`."""
        if self._first is None:
            self._first, self._began = step - 1, time.monotonic() - row.get("time", {}).get("step", 0.0)
        self._step, self._row, self._status = step, row, ""
        if "reward" in row:
            self._rewards.append(row["reward"])
        if self._live is None:
            self.say(self._line(step, row))

    def _left(self) -> str:
        done = self._step - (self._first or 0)
        return duration((time.monotonic() - self._began) / done * (self._steps - self._step)) if done else "?"

    def _line(self, step: int, row: dict[str, Any]) -> str:
        parts = " ".join(f"{k} {v:.2f}" for k, v in row.get("time", {}).items() if k != "step")
        said = [f"step {step}/{self._steps}", *(f"{name} {value}" for name, value in self._numbers(row))]
        return " ".join([*said, f"{row.get('time', {}).get('step', 0.0):.2f} s ({parts})", f"left {self._left()}"])

    @staticmethod
    def _numbers(row: dict[str, Any]) -> list[tuple[str, str]]:
        """What is known of a step, by name: a run without engines has no reward and samples no tokens."""
        forms = {"reward": ".3f", "loss": "+.4f", "tokens_per_s": ".0f", "version": ""}
        names = {"tokens_per_s": "tokens/s", "version": "weights"}
        said = [(names.get(k, k), format(row[k], form)) for k, form in forms.items() if row.get(k) is not None]
        prompts = row.get("kv", {}).get("computed", 0) + row.get("kv", {}).get("reused", 0)
        return [*said, ("cached", f"{row['kv']['reused'] / prompts:.0%}")] if prompts else said

    def _render(self):
        row, table = self._row, Table.grid(padding=(0, 2))
        table.add_row("step", f"{self._step}/{self._steps}", "left", self._left())
        if numbers := self._numbers(row):
            table.add_row(*(word for pair in numbers for word in pair))
        lines: list[Any] = [table]
        if self._rewards:
            lines.append(Text(f"reward    {sparkline(self._rewards)}  {min(self._rewards):.2f}..{max(self._rewards):.2f}"))
        if self._held_out:
            values = [v for _, v in self._held_out]
            lines.append(Text(f"held-out  {sparkline(values)}  {values[0]:.3f} -> {values[-1]:.3f} (step {self._held_out[-1][0]})"))
        if row.get("time"):
            total = row["time"].get("step") or 1.0
            lines.append(Text("seconds   " + "  ".join(f"{k} {v:.2f} ({v / total:.0%})" for k, v in row["time"].items() if k != "step") + f"  step {total:.2f}"))
        if self._status:
            lines.append(Text(f"{self._status} ({duration(time.monotonic() - self._status_since)})", style="dim"))
        return Panel(Group(*lines), title=self._title, title_align="left")
