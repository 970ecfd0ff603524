"""The trainer's checkpoints: TorchTitan's CheckpointManager, with the controller's state inside each.

A folder `checkpoints/step-N` counts once its `.metadata` is there, which is written and renamed last, after the files it
speaks of are on the disk. What is saved is copied first and written by a thread, while the trainer goes on. Saving a step
again moves the old folder aside until the new one is whole.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from milkweed.errors import DataError
from milkweed.training import titan
from milkweed.types import PolicyVersion

FULL_BYTES = 8 << 20
"""A disk with less room than this counts as full where something could not be written to it."""


@dataclass
class Found:
    """What a checkpoint says beside the weights."""

    version: PolicyVersion
    state: str
    peak_lr: float


class _TrainState:
    """Stateful, as the checkpoint library wants it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"version": "0.0", "state": "", "peak_lr": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


class Checkpoints:
    """Saves and finds checkpoints under `run_dir`/checkpoints; every method is collective."""

    def __init__(self, parallel: titan.Parallel, optimizers: Any, run_dir: Path, keep: int) -> None:
        self.folder = run_dir.absolute() / "checkpoints"
        self.state = _TrainState()
        self.schedule = _TrainState()  # the rate is a function of the step, so there is nothing to keep
        self.broken: dict[int, str] = {}
        """Checkpoints that the last `load` found unreadable, and why."""
        self._aside: Path | None = None
        self.manager = titan.checkpointer(parallel, optimizers, self.schedule, self.state, str(run_dir.absolute()), keep)

    def _first(self) -> bool:
        return dist.get_rank() == 0

    def _barrier(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def save(self, version: PolicyVersion, state: str, peak_lr: float) -> str:
        """Begin to write `step-N` for `version`; returns its folder. What is saved is as it was when this returns; the
        checkpoint counts once `done` says so. One that is still being written is waited for first."""
        self.finish()
        self.state.values = {"version": str(version), "state": state, "peak_lr": peak_lr}
        place, aside = self.folder / f"step-{version.step}", self.folder / f"replaced-{version.step}"
        if self._first() and place.exists():
            if (place / ".metadata").exists():
                shutil.rmtree(aside, ignore_errors=True)
                place.rename(aside)
            else:
                shutil.rmtree(place)
        self._barrier()
        self._aside = aside
        self.manager.save(version.step)
        return str(place)

    def done(self) -> bool:
        """Whether this rank has written its part of what was saved last. Raises what writing it raised."""
        future = self.manager.save_future
        if future is not None and future.done():
            self._check(future)
        return future is None or future.done()

    def _check(self, future: Any) -> None:
        """Raises what it raised, once: what is saved next is another matter."""
        if (error := future.exception()) is not None:  # waits
            self.manager.save_future = None
            raise DataError(f"the checkpoint could not be written: {_cause(error)}{_full(error, self.folder)}") from error

    def finish(self) -> None:
        """Waits until what was saved last is whole. Raises what writing it raised."""
        error, waits = "", self.manager.save_future is not None
        if waits:
            try:
                self._check(self.manager.save_future)
            except DataError as failed:
                error = str(failed)
        if error := self._agree(error):  # on all ranks or on none: they go on together
            self.manager.save_future = None
            raise DataError(error)
        if waits:
            self.manager.maybe_wait_for_saving()
            self._barrier()
        if self._aside is not None and self._first():
            shutil.rmtree(self._aside, ignore_errors=True)
        self._aside = None

    def load(self, step: int | None = None) -> Found | None:
        """Restore the latest whole checkpoint, or that of `step`, into model and optimiser; None where there is none.

        Where the latest cannot be read although it looks whole, the one before it is taken, and `broken` has why. Raises
        DataError where none of those that are there can be read."""
        self.finish()
        self.broken = {}
        if self._first() and self.folder.is_dir():
            for aside in self.folder.glob("replaced-*"):
                place = self.folder / aside.name.replace("replaced", "step")
                if (place / ".metadata").exists():
                    shutil.rmtree(aside)
                else:
                    shutil.rmtree(place, ignore_errors=True)
                    aside.rename(place)
        self._barrier()
        for candidate in self.whole() if step is None else [step]:
            if not (self.folder / f"step-{candidate}" / ".metadata").exists():
                continue
            try:
                error = "" if self.manager.load(candidate) else "it was not found"
            except (Exception, CheckpointException) as raised:  # whatever a rotten file makes the library raise
                error = _cause(raised)
            if not (error := self._agree(error)):
                v = self.state.values
                return Found(PolicyVersion.parse(v["version"]), v["state"], float(v["peak_lr"]))
            self.broken[candidate] = error
        if self.broken:
            causes = "; ".join(f"step-{n}: {why}" for n, why in self.broken.items())
            raise DataError(f"{self.folder}: no checkpoint there can be read ({causes}); remove them to begin anew")
        return None

    def whole(self) -> list[int]:
        """The steps of which a checkpoint looks whole, newest first."""
        folders = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted((int(f.name.removeprefix("step-")) for f in folders if (f / ".metadata").exists()), reverse=True)

    def _agree(self, error: str) -> str:
        errors = [error]
        if dist.get_world_size() > 1:
            errors = [""] * dist.get_world_size()
            dist.all_gather_object(errors, error)
        return next((e for e in errors if e), "")

    def close(self) -> None:
        """Finishes what is being written."""
        try:
            self.finish()
        finally:
            self.manager.close()


def _full(error: BaseException, folder: Path) -> str:
    """PyTorch says of a full disk only that a file has not grown as it should have."""
    text = _cause(error)
    short = any(words in text for words in ("unexpected pos", "file write failed", "failed writing file"))
    free = shutil.disk_usage(folder).free if folder.is_dir() else FULL_BYTES
    return f" (the disk is full: {free >> 20} MiB are left at {folder})" if short or free < FULL_BYTES else ""


def _cause(error: BaseException) -> str:
    """What the library's exception, which is a BaseException and holds every rank's, is about."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}".strip().rstrip(":")


__all__ = ["Checkpoints", "Found"]
