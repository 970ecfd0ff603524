"""The rows of a run's metrics: what a step was made of, what it gave and how long its parts took."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from milkweed.errors import DataError
from milkweed.fleet.supervision import Event
from milkweed.observe.lines import Lines
from milkweed.observe.metrics import MetricsLog
from milkweed.observe.samples import SampleLog
from milkweed.observe.view import View
from milkweed.runs.config import RunConfig
from milkweed.runs.sampling import drops
from milkweed.types import Group, PolicyVersion


class Rows:
    """Gathers the row of the step under way and writes it to metrics, samples and view."""

    def __init__(self, config: RunConfig, folder: Path, view: View, *, resumed_at: int | None, record: dict[str, Any]) -> None:
        self.view = view
        self._metrics = MetricsLog(folder, resumed_at=resumed_at, wandb=config.wandb, config=record)
        self._faults = Lines(folder / "faults.jsonl")
        self._samples = SampleLog(folder, per_step=config.samples_logged, resumed_at=resumed_at)
        self._step: dict[str, Any] = {}
        self._kv: dict[str, Any] = {}

    def fault(self, step: int, event: Event) -> None:
        """Says a fault, or what came of it, and appends it to faults.jsonl."""
        text = {
            "failed": f"{event.replica} failed ({event.kind}): {event.cause}",
            "waiting": f"{event.replica} waits for a host: {event.cause}",
            "replaced": f"{event.replica} serves again after {event.after_s:.1f} s",
            "scaled": event.cause,
            "given up": f"{event.replica} is given up ({event.kind}): {event.cause}",
        }
        self.view.say(text[event.what])
        row = {"step": step, "at": time.time(), **msgspec.to_builtins(event)}
        self._faults.add(msgspec.json.encode(row).decode())

    def sampled(self, step: int, groups: list[Group], began: float, generate: float, reward: float, more: dict[str, float], kv: dict[str, Any]) -> None:
        """Begins the row of `step`, whose groups were asked for at `began` (monotonic) and took the engines `generate`
        seconds, the scorers `reward` more after those. `kv` is what `Router.kv` says now. Raises DataError where not one trajectory of them was scored, with the reasons."""
        scored = [t for g in groups for t in g.scored]
        if not scored:
            reasons = "; ".join(sorted({t.dropped or "?" for g in groups for t in g.trajectories})[:5])
            raise DataError(f"step {step}: not one of {sum(len(g.trajectories) for g in groups)} trajectories could be scored: {reasons}")
        tokens = sum(t.sampled for t in scored)
        before, self._kv = self._kv, kv
        self._step = {
            "began": began,
            "generate": generate,
            "reward": reward,
            "tokens": tokens,
            "groups": groups,
            "row": {
                "reward": sum(t.reward or 0.0 for t in scored) / len(scored),
                "length": tokens / len(scored),
                "trajectories": len(scored),
                "dropped": drops(groups),
                "finish": _fractions([t.finish_reason for t in scored]),
                **more,
                "kv": _speeds(_since(before, kv)),
            },
        }

    def trained(self, metrics: dict[str, float], role: str) -> None:
        """An update of `role` gave `metrics`; those of others than the trainer stand under the role's name."""
        self._step.setdefault("began", time.monotonic() - metrics["seconds"])
        self._step["train"] = self._step.get("train", 0.0) + metrics["seconds"]
        row, numbers = self._step.setdefault("row", {}), {k: v for k, v in metrics.items() if k != "seconds"}
        row.update(numbers if role == "trainer" else {role: numbers})

    def end(self, version: PolicyVersion, update: dict[str, float]) -> dict[str, Any]:
        """Writes and shows the row of the step that made `version`; `update` is what publishing took. Returns it."""
        state, self._step = self._step, {}
        took = time.monotonic() - state.get("began", time.monotonic())
        parts = {"generate": state.get("generate"), "reward": state.get("reward"), "train": state.get("train"), "update": update.get("update")}
        times = {k: round(v, 4) for k, v in parts.items() if v is not None}
        row = {
            **state.get("row", {}),
            "version": str(version),
            **({"tokens_per_s": state["tokens"] / took} if state.get("tokens") and took else {}),
            "time": {"step": round(took, 4), **times},
        }
        row["memory"] = {"controller_mb": round(_resident() / 1e6, 1)}
        if update:
            row["transfer"] = {k: v for k, v in update.items() if k != "update"}
        self._metrics.log(version.step, row)
        if state.get("groups"):
            self._samples.log(version.step, state["groups"])
        self.view.update(version.step, row)
        return row

    def note(self, step: int, numbers: dict[str, float]) -> None:
        """Further numbers of `step`."""
        self._metrics.log(step, numbers)

    def held_out(self, step: int, groups: Sequence[Group], mean: float, trajectories: int, seconds: float) -> None:
        """An evaluation under the weights of `step`."""
        row = {"held_out": {"reward": mean, "trajectories": trajectories, "dropped": drops(groups)}, "time": {"evaluate": seconds}}
        self._metrics.log(step, row)
        self._samples.log(step, list(groups), "held-out")
        self.view.held_out(step, mean)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._faults.close()


def _resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two looks at counters, nested or not."""
    return {k: _since(before.get(k, {}), v) if isinstance(v, dict) else v - before.get(k, 0) for k, v in now.items()}


def _speeds(kv: dict[str, Any]) -> dict[str, Any]:
    """With GB/s of what went to files, came from them and was moved between engines, in place of microseconds."""
    for kind in ("read", "written", "moved"):
        if took := kv.pop(f"{kind}_us", 0):
            kv[f"{kind}_gb_s"] = kv[f"{kind}_bytes"] / took / 1e3
    return {k: _speeds(v) if isinstance(v, dict) else v for k, v in kv.items()}


def _fractions(names: Sequence[str]) -> dict[str, float]:
    return {name: names.count(name) / len(names) for name in sorted(set(names))}
