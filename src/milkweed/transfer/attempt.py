"""One pull under way: what is asked, until when, how far it is, and the thread it runs in."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Chunk, Manifest, RankManifest
from milkweed.transfer.slots import Slot

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Attempt:
    """One pull: what is asked, until when, and how far it is. `lock` orders its steps against being given up."""

    def __init__(self, manifest: Manifest, deadline: float, deadline_s: float) -> None:
        self.manifest, self.deadline, self.deadline_s = manifest, deadline, deadline_s
        self.lock = threading.Lock()
        self.given_up = False
        self.reading = False  # inside NIXL, which may never return; all else is local work that ends by itself
        self.slot: Slot | None = None

    def step(self, reading: bool) -> None:
        """Enter or leave NIXL. Raises TransferError if the pull was given up meanwhile."""
        with self.lock:
            self.check_given_up()
            self.reading = reading

    def place(self, rank: RankManifest, chunk: Chunk | None = None) -> str:
        """Where an error happened."""
        at = f"version {self.manifest.version} from {rank.peer}"
        if chunk is None:
            return at
        return f"{at}, bytes {chunk.offset}:{chunk.offset + chunk.nbytes} ({rank.tensors_in(chunk)})"

    def check_time(self, rank: RankManifest, chunk: Chunk) -> None:
        """Raises TransferError past the deadline, naming who was being waited for."""
        self.check_given_up()
        if time.monotonic() > self.deadline:
            raise TransferError(
                f"{self.place(rank, chunk)}: no answer within {self.deadline_s:g} s; "
                "the rank is hung, stopped or unreachable"
            )

    def check_given_up(self) -> None:
        if self.given_up:
            raise TransferError(f"the pull of version {self.manifest.version} was given up")


class naming:
    """Puts the place in front of a TransferError raised inside."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TransferError):
            raise TransferError(f"{self.place}: {error}") from error


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run in a daemon thread: unlike an executor's, one that never returns does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # given up: nobody will ask for it

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # handed to whoever awaits, whatever it is
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: nobody awaits any more
            _log.warning("%s ended after its event loop: %r", name, error or "done")

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
