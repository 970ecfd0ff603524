"""A full disk: the ledger waits, says so, loses and doubles nothing, and goes on when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from types import SimpleNamespace

import msgspec
import pytest

from milkweed.data import pack
from milkweed.data.ledger import Ledger, audit
from milkweed.data.ledger import ledger as module
from milkweed.errors import DataError, RemoteError, no_room
from milkweed.observe.trained import TrainedLogprobs, read_trained
from milkweed.runs.run import Run, RunConfig, start
from milkweed.types import PolicyVersion
from test_ledger import issue, trajectory


class Disk:
    """Writes fail half-way while it is full."""

    def __init__(self, monkeypatch) -> None:
        self.full, self.refused, self._write = True, 0, os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(module, "FULL_S", 0.02)

    def write(self, file: int, data) -> int:
        if not self.full or len(data) < 20:
            return self._write(file, data)
        self.refused += 1
        if self.refused == 1:
            return self._write(file, data[:7])  # what has room is written
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_ledger_waits_for_room_and_nothing_is_torn(tmp_path, monkeypatch):
    async def story() -> list[str]:
        ledger, said = Ledger(tmp_path / "ledger"), []
        ledger.on_full = said.append
        ledger.resume(PolicyVersion(), staleness=0)
        disk = Disk(monkeypatch)
        ledger.issue([issue(1), issue(2)])
        for number in (1, 2):
            for sample in range(2):
                ledger.finish(number, trajectory(sample))
        flush, room = asyncio.create_task(ledger.flush(deadline_s=0.1)), None
        while not ledger.full:
            await asyncio.sleep(0.01)
        room = asyncio.create_task(ledger.room())
        await asyncio.sleep(0.3)
        assert not flush.done() and not room.done(), "a full disk is waited for, whatever the deadline"
        disk.full = False
        await asyncio.wait_for(asyncio.gather(flush, room), 5)
        ledger.close()
        return said

    said = asyncio.run(story())
    assert len(said) == 2 and "No space left" in said[0] and said[1] == ""
    report = audit(tmp_path)
    assert report.agrees and (report.issued, report.held) == (4, 4), report.text()


def test_a_ledger_that_is_closed_on_a_full_disk_says_what_it_could_not_write(tmp_path, monkeypatch):
    async def story() -> None:
        ledger = Ledger(tmp_path / "ledger")
        ledger.resume(PolicyVersion(), staleness=0)
        Disk(monkeypatch)
        ledger.issue([issue(1)])
        ledger.finish(1, trajectory(0))
        while not ledger.full:
            await asyncio.sleep(0.01)
        with pytest.raises(DataError, match="No space left"):
            ledger.close()

    asyncio.run(story())


def test_a_full_disk_is_known_whoever_passes_it_on():
    inner = OSError(errno.ENOSPC, "no")
    outer = RuntimeError("the checkpoint failed")
    outer.__cause__ = inner
    assert no_room(outer) and no_room(sqlite3.OperationalError("database or disk is full"))
    assert no_room(RemoteError("trainer0", "raised", "OSError: [Errno 28] No space left on device")) and not no_room(ValueError("full of errors"))


class Writer:
    """A trainer whose checkpoints fail while the disk is full: at once, or when they are asked after."""

    def __init__(self, late: bool) -> None:
        self.late, self.full, self.begun, self.failed = late, True, [], False

    async def save(self, state, *, wait):
        if self.full and not self.late:
            raise DataError("the checkpoint could not be written: OSError: [Errno 28] No space left on device")
        self.begun.append(state)
        self.failed = self.full

    async def saved(self, *, wait=False, deadline_s=None):
        if self.failed:
            self.failed = False
            raise DataError("the checkpoint could not be written: RuntimeError: unexpected pos (the disk is full: 0 MiB are left)")
        return True


class Counted:
    def __init__(self) -> None:
        self.counted: list[PolicyVersion] = []

    async def before_checkpoint(self) -> None:
        return None

    def after_checkpoint(self, version) -> None:
        self.counted.append(version)


def saving(late: bool, monkeypatch):
    from types import SimpleNamespace

    from milkweed.runs import saving as module
    from milkweed.runs.saving import Saving

    monkeypatch.setattr(module, "FULL_S", 0.01)
    said: list[str] = []
    mesh = SimpleNamespace(trainer=Writer(late), critic=None, version=PolicyVersion(0, 5))
    made = Saving(mesh, SimpleNamespace(say=said.append), lambda: {"step": mesh.version.step})
    made.flow = Counted()
    return made, mesh, said


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_waits_for_room_and_the_run_goes_on(late, monkeypatch):
    async def story() -> None:
        it, mesh, said = saving(late, monkeypatch)
        writing = asyncio.create_task(it.write(wait=True))
        await asyncio.sleep(0.1)
        assert not writing.done() and len(said) == 1 and "waits for room on the disk" in said[0], "said once"
        mesh.trainer.full = False
        await asyncio.wait_for(writing, 5)
        assert it.flow.counted == [PolicyVersion(0, 5)] and "there is room again: checkpoint 5" in said[1]

    asyncio.run(story())


def test_a_checkpoint_that_failed_while_the_run_went_on_is_followed_by_another(monkeypatch):
    async def story() -> None:
        it, mesh, said = saving(True, monkeypatch)
        await it.write(wait=False)
        mesh.version, mesh.trainer.full = PolicyVersion(0, 7), False
        await it.look()
        assert it.flow.counted == [PolicyVersion(0, 7)] and mesh.trainer.begun[-1] == {"step": 7}
        mesh.trainer.full = True
        await it.write(wait=False)
        mesh.version, mesh.trainer.full = PolicyVersion(0, 9), False
        await it.write(wait=False)  # it hears of the failure here
        assert it.flow.counted[-1] == PolicyVersion(0, 9) and it.under_way is None

    asyncio.run(story())


def test_another_failure_of_a_checkpoint_is_not_waited_for(monkeypatch):
    async def story() -> None:
        it, mesh, said = saving(False, monkeypatch)

        async def broken(state, *, wait):
            raise DataError("the checkpoint could not be written: PermissionError")

        mesh.trainer.save = broken
        with pytest.raises(DataError, match="PermissionError"):
            await asyncio.wait_for(it.write(wait=True), 5)
        assert not said

    asyncio.run(story())


def test_pytorchs_word_for_a_full_disk_is_understood(tmp_path):
    from milkweed.training.checkpoints import _full

    short = _full(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), tmp_path)
    assert no_room(DataError(f"no checkpoint{short}"))
    assert _full(RuntimeError("something else"), tmp_path) == ""


def test_what_is_written_for_people_waits_for_room_in_whole_lines(tmp_path, monkeypatch):
    from milkweed.observe.lines import Lines

    lines = Lines(tmp_path / "metrics.jsonl")
    lines.add("a first line that is long enough")
    disk = Disk(monkeypatch)
    lines.add("a second line that is long enough")
    lines.add("a third line that is long enough")
    assert disk.refused and (tmp_path / "metrics.jsonl").read_text() == "a first line that is long enough\n"
    disk.full = False
    lines.add("a last line that is long enough")
    assert [line.split()[1] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == ["first", "second", "third", "last"]
    lines.close()
    lines.close()


def test_a_full_disk_keeps_logprobs_waiting_and_leaves_no_half_of_a_step(tmp_path, monkeypatch):
    ids = [1, 2, 3]
    batch = pack([msgspec.structs.replace(trajectory(0), token_ids=ids, loss_mask=[False, True, True], logprobs=[0.0, -1.0, -1.0])], [1.0], row_len=4)
    disk, log = Disk(monkeypatch), TrainedLogprobs(tmp_path)
    for step in (1, 2):
        log.write(step, batch, batch.tokens.float())
    assert disk.refused == 3 and list((tmp_path / "logprobs").iterdir()) == []
    disk.full = False
    log.write(3, batch, batch.tokens.float())
    disk.full = True
    log.write(4, batch, batch.tokens.float())
    disk.full = False
    log.close()
    assert [read_trained(tmp_path, step).of(ids) for step in (1, 2, 3, 4)] == [[1.0, 2.0, 3.0]] * 4


def test_a_run_that_cannot_be_closed_says_so_and_still_ends_with_what_ended_it(monkeypatch):
    run, said = object.__new__(Run), []

    async def full() -> None:
        raise DataError("the ledger cannot be written: the disk is full")

    async def opened(config, **options) -> Run:
        return run

    run._close, run.directory = full, SimpleNamespace(close=lambda: said.append("closed"))  # type: ignore[method-assign, assignment]
    run.view = SimpleNamespace(say=said.append, __exit__=lambda *a: None)  # type: ignore[assignment]
    monkeypatch.setattr(Run, "open", opened)

    async def story() -> None:
        async with start(RunConfig()):
            raise ZeroDivisionError("what the recipe did")

    with pytest.raises(ZeroDivisionError, match="what the recipe did"):
        asyncio.run(story())
    assert said == ["while the run was ended: the ledger cannot be written: the disk is full", "closed"]
