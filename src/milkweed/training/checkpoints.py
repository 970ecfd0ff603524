"""The trainer's checkpoints: TorchTitan's CheckpointManager, with the controller's state inside each.

A folder `checkpoints/step-N` counts once its `.metadata` is there, which is written and renamed last, after the files it
speaks of are on the disk. What is saved is copied first and written by a thread, while the trainer goes on. Saving a step
again moves the old folder aside until the new one is whole. The library would load flipped bits as they are, so each rank adds
the checksums of what it wrote (`sums-RANK.json`), and what differs from them is not loaded; what has none, because its writer
was killed before the last of its work, is loaded unseen.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from milkweed.errors import DataError
from milkweed.files import write_atomic
from milkweed.training import titan
from milkweed.types import PolicyVersion

_log = logging.getLogger(__name__)
FULL_BYTES = 8 << 20
"""A disk with less room than this counts as full where something could not be written to it."""
SUM_S = 600.0
"""To read again what a rank has written."""


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
        self._summed = threading.Event()
        self._summed.set()
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
        if self.manager.save_future is not None:
            self._summed.clear()
            self.manager.save_future.add_done_callback(lambda written: self._sum(place, written))
        return str(place)

    def _sum(self, place: Path, written: Future[Any]) -> None:
        """In the thread that wrote."""
        try:
            if written.cancelled() or written.exception() is not None:
                return
            rank = dist.get_rank()
            names = [f.name for f in place.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
            text = json.dumps({name: _checksum(place / name) for name in sorted(names)})
            write_atomic(place / f"sums-{rank}.json", text.encode())
        except OSError as error:
            _log.warning("%s has no checksums: %s", place, error)
        finally:
            self._summed.set()

    def _wrong(self, place: Path) -> str:
        """What is not as it was written, of this rank's share of the files; empty where nothing is."""
        sums: dict[str, list[int]] = {}
        try:
            for file in sorted(place.glob("sums-*.json")):
                sums |= json.loads(file.read_text())
            for i, (name, sum_) in enumerate(sorted(sums.items())):
                if i % dist.get_world_size() == dist.get_rank() and _checksum(place / name) != sum_:
                    return f"{name} is not as it was written (its size or checksum differs)"
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def done(self) -> bool:
        """Whether this rank has written its part of what was saved last. Raises what writing it raised."""
        future = self.manager.save_future
        if future is not None and future.done():
            self._check(future)
        return future is None or (future.done() and self._summed.is_set())

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
            if not self._summed.wait(SUM_S):
                _log.warning("%s: checksums were not made within %g s and are not waited for", self.folder, SUM_S)
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
                if not (error := self._agree(self._wrong(self.folder / f"step-{candidate}"))):
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


def _checksum(file: Path) -> list[int]:
    """Its size and xxh3."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb") as bytes_:
        while piece := bytes_.read(16 << 20):
            digest.update(piece)
            size += len(piece)
    return [size, digest.intdigest()]


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
