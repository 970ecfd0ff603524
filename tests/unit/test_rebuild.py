"""A trainer's ranks die, at any call: new ones come to the same weights, or the fault is raised with its cause."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from milkweed.config import FaultsConfig
from milkweed.errors import DataError, FleetError, PeerDied, RemoteError, StepRefused
from milkweed.fleet.supervision import Event
from milkweed.training.config import TrainerConfig
from milkweed.training.rebuild import History
from milkweed.training.trainer import Trainer
from milkweed.types import PolicyVersion


class Disk:
    """What outlives the ranks."""

    def __init__(self) -> None:
        self.checkpoints: dict[int, tuple[PolicyVersion, float, float]] = {}
        self.copies: dict[int, tuple[PolicyVersion, float, float]] = {}


class Ranks:
    """One rank whose weights are a number: each step adds its batch times the rate."""

    def __init__(self, disk: Disk, fatal: list[str], drift: float = 0.0) -> None:
        self.disk, self.fatal, self.drift = disk, fatal, drift
        self.name, self.failure, self.stopped = "trainer0", None, False
        self.weights, self.lr, self.version = 0.0, 1.0, PolicyVersion()
        self.calls: list[str] = []

    async def call(self, endpoint: str, *args: Any, deadline_s: float) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        self.calls.append(endpoint)
        if self.fatal and self.fatal[0] == endpoint:
            self.fatal.pop(0)
            self.failure = PeerDied(self.name, "died", "killed by SIGKILL; last line: Bus error")
            raise self.failure
        return [(await getattr(self, "do_" + endpoint)(*args), 0.5)]

    async def stop(self) -> None:
        self.stopped = True

    async def do_start(self, *args: Any) -> dict[str, Any]:
        return {}

    async def do_update(self, batch: float, loss: bytes, clip_norm: float | None) -> dict[str, Any]:
        if batch < 0:
            raise RemoteError(self.name, "raised", "StepRefused") from StepRefused("not finite")
        self.weights += batch * self.lr + self.drift
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)
        return {"metrics": {"loss": self.weights, "grad_norm": batch, "tokens": 1.0, "seconds": 0.5}, "version": self.version, "logprobs": None}

    async def do_set_lr(self, lr: float) -> float:
        self.lr = lr
        return lr

    async def do_save(self, state: str) -> str:
        self.disk.checkpoints[self.version.step] = (self.version, self.weights, self.lr)
        return "folder"

    async def do_saved(self, wait: bool) -> bool:
        return True

    async def do_close(self) -> None:
        pass

    async def do_load(self, incarnation: int | None, step: int | None) -> dict[str, Any]:
        if not self.disk.checkpoints:
            self.version = PolicyVersion(incarnation or 0, 0)
            return {"state": None, "version": self.version, "peak_lr": 1.0, "broken": {}}
        saved, self.weights, self.lr = self.disk.checkpoints[max(self.disk.checkpoints) if step is None else step]
        self.version = PolicyVersion(saved.incarnation + 1 if incarnation is None else incarnation, saved.step)
        return {"state": "{}", "version": self.version, "peak_lr": 1.0, "broken": {}}

    async def do_copy(self) -> None:
        self.disk.copies[self.version.step] = (self.version, self.weights, self.lr)

    async def do_copied(self) -> bool:
        return True

    async def do_restore(self, incarnation: int, step: int) -> PolicyVersion:
        if step not in self.disk.copies:
            raise RemoteError(self.name, "raised", "DataError") from DataError("there is none")
        self.version, self.weights, self.lr = self.disk.copies[step]
        return self.version

    async def do_adopt(self, layout: bytes, dtype: str) -> Any:
        return [], 8

    async def do_checksum(self) -> str:
        return str(self.weights)


class Rig:
    def __init__(self, fatal: list[str], *, drift: float = 0.0, copy_every: int = 0) -> None:
        self.disk, self.fatal, self.drift = Disk(), fatal, drift
        self.made: list[Ranks] = []
        self.events: list[Event] = []
        self.trainer = Trainer(self.new(0.0), TrainerConfig(copy_every=copy_every), "model")  # type: ignore[arg-type]
        self.trainer._copies = Path("/nowhere") if copy_every else None
        self.trainer.history = History("trainer0", self.spawn, (), FaultsConfig(first_s=0.01))  # type: ignore[arg-type]
        self.trainer.history.note = self.events.append

    def new(self, drift: float) -> Ranks:
        self.made.append(Ranks(self.disk, self.fatal, drift))
        return self.made[-1]

    async def spawn(self) -> Ranks:
        return self.new(self.drift)

    async def train(self, *batches: float) -> None:
        for batch in batches:
            await self.trainer.update(batch, loss)  # type: ignore[arg-type]


def loss(*_: Any) -> Any:
    raise AssertionError("it is shipped, never called here")


@pytest.mark.parametrize("at", ["update", "save", "checksum", "set_lr", "adopt"])
def test_the_call_that_finds_dead_ranks_ends_as_if_nothing_had_been(at):
    async def story(fatal: list[str]) -> tuple[str, PolicyVersion, Rig]:
        rig = Rig(fatal)
        await rig.trainer.load(3)
        await rig.train(1.0, 2.0)
        await rig.trainer.save()
        await rig.train(4.0)
        await rig.trainer.set_lr(0.5)
        await rig.trainer.adopt(b"layout")
        await rig.train(8.0)
        return await rig.trainer.checksum(), rig.trainer.version, rig

    undisturbed, version, _ = asyncio.run(story([]))
    again, same, rig = asyncio.run(story([at]))
    assert (again, same) == (undisturbed, version) == ("11.0", PolicyVersion(3, 4))
    assert len(rig.made) == 2 and rig.made[0].stopped
    assert [e.what for e in rig.events] == ["failed", "replaced"] and "Bus error" in rig.events[0].cause


def test_ranks_that_die_while_they_are_rebuilt_are_rebuilt_once_more():
    async def story() -> Rig:
        rig = Rig([])
        await rig.train(1.0, 2.0)
        rig.fatal += ["update", "start", "update"]
        await rig.train(4.0)
        return rig

    rig = asyncio.run(story())
    assert rig.made[-1].weights == 7.0 and len(rig.made) == 4


def test_a_fault_that_repeats_is_raised_with_its_cause():
    async def story() -> Rig:
        rig = Rig([])
        await rig.train(1.0)
        rig.fatal += ["update"] * 20
        with pytest.raises(FleetError, match=r"5 times without a step in between, the last: .*Bus error"):
            await rig.train(2.0)
        return rig

    rig = asyncio.run(story())
    assert len(rig.made) == 5 and all(r.stopped for r in rig.made) and rig.events[-1].what == "given up"


def test_steps_that_come_out_differently_are_not_taken_for_the_same_version():
    async def story() -> None:
        rig = Rig([], drift=1e-9)
        await rig.train(1.0)
        rig.fatal.append("update")
        with pytest.raises(FleetError, match="step 1 trained again gave loss 1.000000001, not 1.0"):
            await rig.train(2.0)
        assert rig.made[-1].stopped

    asyncio.run(story())


def test_what_the_ranks_refuse_rebuilds_nothing():
    async def story() -> None:
        rig = Rig([])
        await rig.train(1.0)
        with pytest.raises(StepRefused):
            await rig.train(-1.0)
        assert len(rig.made) == 1 and rig.events == []

    asyncio.run(story())


def test_what_was_told_lies_in_a_file_until_a_checkpoint_holds_it():
    async def story() -> None:
        rig = Rig([])
        kept = rig.trainer.history._file  # type: ignore[union-attr]
        size = lambda: os.fstat(kept.fileno()).st_size  # noqa: E731
        await rig.train(*[1.0] * 50)
        before = size()
        await rig.trainer.save()
        await rig.train(2.0)
        await rig.trainer.saved(wait=True)
        assert 0 < size() < before / 20  # the step after the checkpoint is still there
        rig.fatal.append("update")
        await rig.train(4.0)
        assert rig.made[-1].weights == 56.0
        await rig.trainer.close()
        assert kept.closed

    asyncio.run(story())


def test_steps_that_a_full_disk_did_not_keep_are_not_trained_again_and_the_next_checkpoint_mends_it():
    async def story() -> None:
        rig = Rig([])
        history = rig.trainer.history
        assert history is not None
        room = history._write

        def full(data: bytes) -> None:
            room(data[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        history._write = full  # type: ignore[method-assign]
        await rig.train(1.0)
        history._write = room  # type: ignore[method-assign]
        await rig.train(2.0)
        await rig.trainer.save()
        await rig.trainer.saved(wait=True)
        rig.fatal.append("update")
        await rig.train(4.0)
        assert rig.made[-1].weights == 7.0
        history._write = full  # type: ignore[method-assign]
        await rig.train(8.0)
        rig.fatal.append("update")
        with pytest.raises(FleetError, match="update cannot be done again: its batch could not be kept: No space left on device"):
            await rig.train(16.0)

    asyncio.run(story())


@pytest.mark.parametrize("at", ["update", "save", "saved", "copy", "copied", "restore", "set_lr"])
def test_ranks_that_copy_themselves_come_back_from_the_copy_and_train_only_what_came_after(at):
    async def story(fatal: list[str]) -> Rig:
        rig = Rig([], copy_every=2)
        await rig.trainer.load(3)
        await rig.train(1.0, 2.0, 4.0)
        rig.fatal += [*fatal, *(["update"] if at == "restore" else [])][::-1]
        await rig.trainer.set_lr(0.5)
        await rig.train(8.0)
        await rig.trainer.save()
        await rig.train(16.0)
        await rig.trainer.saved(wait=True)
        await rig.train(32.0, 64.0)
        return rig

    undisturbed, rig = asyncio.run(story([])), asyncio.run(story([at]))
    assert (rig.made[-1].weights, rig.trainer.version) == (undisturbed.made[-1].weights, undisturbed.trainer.version) == (67.0, PolicyVersion(3, 7))
    assert len(rig.made) == (3 if at == "restore" else 2)
    if at == "copied":  # step 6's is not known to be whole then, and the one before is older than the checkpoint
        assert "restore" not in rig.made[1].calls and "load" in rig.made[1].calls
    else:
        assert "restore" in rig.made[1].calls and "load" not in rig.made[1].calls


def test_a_copy_that_is_gone_costs_one_more_start_and_the_checkpoint_is_taken():
    async def story() -> Rig:
        rig = Rig([], copy_every=1)
        await rig.trainer.load(0)
        await rig.train(1.0, 2.0)
        rig.disk.copies.clear()
        rig.fatal.append("update")
        await rig.train(4.0)
        return rig

    rig = asyncio.run(story())
    assert rig.made[-1].weights == 7.0 and len(rig.made) == 3 and "load" in rig.made[2].calls
    assert "the copy of step 1 in memory could not be read: there is none" in rig.events[1].cause


def test_a_copy_behind_a_checkpoint_that_was_not_whole_yet_is_not_taken():
    async def story() -> Rig:
        rig = Rig([], copy_every=1)
        await rig.trainer.load(0)
        await rig.train(1.0)
        await rig.trainer.save(wait=False)
        await rig.train(2.0, 4.0)
        rig.disk.checkpoints.clear()  # it was not whole yet
        rig.fatal.append("saved")
        await rig.trainer.saved(wait=True)
        return rig

    rig = asyncio.run(story())
    assert rig.made[-1].weights == 7.0 and rig.made[-1].calls.count("save") == 1 and list(rig.disk.checkpoints) == [1]
