"""A full disk: the ledger waits, says so, loses and doubles nothing, and goes on when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3

import pytest

from milkweed.data.ledger import Ledger, audit
from milkweed.data.ledger import ledger as module
from milkweed.errors import DataError, RemoteError, no_room
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
