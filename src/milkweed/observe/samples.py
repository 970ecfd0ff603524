"""What the policy said, with its rewards: `samples.jsonl` in the run directory, for people to read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from milkweed.observe.lines import Lines
from milkweed.observe.metrics import truncate_jsonl
from milkweed.types import Group


class SampleLog:
    """Appends up to `per_step` groups a step (0: all), each trajectory on a line of its own."""

    def __init__(self, folder: Path, *, per_step: int = 4, resumed_at: int | None = None):
        path = folder / "samples.jsonl"
        if resumed_at is not None:
            truncate_jsonl(path, resumed_at)
        self._file = Lines(path)
        self._per_step = per_step

    def log(self, step: int, groups: Iterable[Group], kind: str = "train") -> None:
        lines = []
        for number, group in enumerate(groups):
            if self._per_step and number >= self._per_step:
                break
            for t in group.trajectories:
                row = {
                    "step": step,
                    "kind": kind,
                    "id": t.id,
                    "prompt": group.prompt.text,
                    "completion": t.completion,
                    "answer": group.prompt.answer,
                    "reward": t.reward,
                    "parts": t.reward_parts,
                    "finish_reason": t.finish_reason,
                    "version": str(t.version),
                    "tokens": t.sampled,
                }
                if t.dropped:
                    row["dropped"] = t.dropped
                lines.append(json.dumps(row, ensure_ascii=False, default=str))
        self._file.add(*lines)

    def close(self) -> None:
        self._file.close()
