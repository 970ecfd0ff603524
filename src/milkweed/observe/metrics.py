"""The numbers of a run, one row a step: `metrics.jsonl` always, TensorBoard beside it, Weights & Biases on request."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from milkweed.errors import ConfigError, no_room
from milkweed.files import write_atomic
from milkweed.observe.lines import Lines

_log = logging.getLogger("milkweed.metrics")


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of `folder/metrics.jsonl`, oldest first. A last line cut short by a crash is left out."""
    path = Path(folder) / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # only the line being written when the process was killed can be broken
    return rows


def truncate_jsonl(path: Path, last_step: int) -> None:
    """Keep only rows of `last_step` and before: what came after the checkpoint will be made again. Atomic."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line)
        except ValueError:
            break
    write_atomic(path, b"".join(line + b"\n" for line in kept))


class MetricsLog:
    """Writes one row a step. `wandb` is a project name; it needs the package `wandb`, or raises ConfigError."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None, wandb: str = "", name: str = "", config: dict | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if resumed_at is not None:
            truncate_jsonl(path, resumed_at)
        self._file = Lines(path)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # flushing by its own thread every 10 s keeps the writer off the loop's path
        self._board: EventFileWriter | None = EventFileWriter(str(folder / "tensorboard"), flush_secs=10)
        self._wandb = None
        if wandb:
            try:
                import wandb as library
            except ImportError as error:
                raise ConfigError("wandb is set but the package is missing: pip install wandb, or leave wandb empty") from error
            self._wandb = library.init(project=wandb, name=name or folder.name, dir=str(folder), config=config, resume="allow", id=folder.name)

    def log(self, step: int, row: dict[str, Any]) -> None:
        """Append `row` (numbers; nested dicts become `a/b`). Rows are flushed at once: they are what a crash leaves."""
        flat = flatten(row)
        self._file.add(json.dumps({"step": step, "time": round(time.time(), 3), **flat}))
        numbers = {k: float(v) for k, v in flat.items() if isinstance(v, (int, float))}
        try:
            if self._board is not None:
                self._board.add_event(_event(step, numbers))
        except OSError as error:  # of its thread, which is dead
            if not no_room(error):
                raise
            self._board = None
            _log.warning("nothing more is written for TensorBoard: %s; metrics.jsonl has everything", error)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} becomes {"a/b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def _event(step: int, numbers: dict[str, float]):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))
