"""The trainer's checkpoints: TorchTitan's CheckpointManager, with the controller's state inside each.

A folder `checkpoints/step-N` counts once its `.metadata` is there, which is written last. Saving a step again moves the
old folder aside until the new one is whole.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from milkweed.training import titan
from milkweed.types import PolicyVersion


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
        self.manager = titan.checkpointer(parallel, optimizers, self.schedule, self.state, str(run_dir.absolute()), keep)

    def _first(self) -> bool:
        return dist.get_rank() == 0

    def _barrier(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def save(self, version: PolicyVersion, state: str, peak_lr: float) -> str:
        """Write `step-N` for `version`; returns its folder."""
        self.state.values = {"version": str(version), "state": state, "peak_lr": peak_lr}
        place, aside = self.folder / f"step-{version.step}", self.folder / f"replaced-{version.step}"
        if self._first() and place.exists():
            if (place / ".metadata").exists():
                shutil.rmtree(aside, ignore_errors=True)
                place.rename(aside)
            else:
                shutil.rmtree(place)
        self._barrier()
        self.manager.save(version.step)
        self._barrier()
        if self._first():
            shutil.rmtree(aside, ignore_errors=True)
        return str(place)

    def load(self, step: int | None = None) -> Found | None:
        """Restore the latest whole checkpoint, or that of `step`, into model and optimiser; None where there is none."""
        if self._first() and self.folder.is_dir():
            for aside in self.folder.glob("replaced-*"):
                place = self.folder / aside.name.replace("replaced", "step")
                if (place / ".metadata").exists():
                    shutil.rmtree(aside)
                else:
                    shutil.rmtree(place, ignore_errors=True)
                    aside.rename(place)
        self._barrier()
        if step is not None and not (self.folder / f"step-{step}" / ".metadata").exists():
            return None
        if not self.manager.load(-1 if step is None else step):
            return None
        v = self.state.values
        return Found(PolicyVersion.parse(v["version"]), v["state"], float(v["peak_lr"]))

    def close(self) -> None:
        self.manager.close()
