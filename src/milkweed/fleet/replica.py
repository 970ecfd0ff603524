"""One replica: its processes, its actors, and calls to them that always end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkweed.errors import DeadlineExceeded, FleetError, PeerDied, RemoteError
from milkweed.fleet.host import Host, tail
from milkweed.fleet.monarch_compat import ActorError, SupervisionError

if TYPE_CHECKING:
    from milkweed.fleet.fleet import Fleet


class Replica:
    """The unit of failure: one process mesh with one actor mesh, never used again after a failure.

    `name` is the role and index ("rollout0"); `uid` also tells it from its predecessors; `pids` are in rank order;
    `log` holds its processes' output. `failure` is set once, whoever notices first; from then on every pending and
    later call raises it at once.
    """

    def __init__(self, fleet: Fleet, role: str, index: int, uid: str, host: Host, log: Path) -> None:
        self.fleet, self.role, self.index, self.uid, self.host, self.log = fleet, role, index, uid, host, log
        self.name = f"{role}{index}"
        self.logged = log.stat().st_size if log.exists() else 0  # what follows is ours, not a predecessor's
        self.pids: list[int] = []
        self.failure: FleetError | None = None
        self.stopped = False
        self.procs: Any = None
        self.actors: Any = None
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._callbacks: list[tuple[asyncio.AbstractEventLoop, Callable[[Replica], None]]] = []

    def __repr__(self) -> str:
        state = "failed" if self.failure else "stopped" if self.stopped else "up"
        return f"<Replica {self.name} {state} pids={self.pids}>"

    async def call(self, endpoint: str, *args: Any, deadline_s: float, **kwargs: Any) -> list[Any]:
        """Call `endpoint` on all ranks; their answers in rank order.

        Raises PeerDied, DeadlineExceeded (the call may still be running there: nothing remote is ever cancelled) or
        RemoteError (its `__cause__` is the remote exception).
        """
        answer = self._send(self.actors, "call", endpoint, args, kwargs)
        values = await self.settle(answer, endpoint, deadline_s)
        return [value for _, value in values.items()]

    def call_one(self, endpoint: str, *args: Any, deadline_s: float, rank: int = 0, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call `endpoint` on one rank; its answer, once awaited. The message leaves at once, before the awaiting. Raises,
        when awaited, as `call`."""
        try:
            self._check()
            mesh = self.actors if len(self.pids) == 1 else self.actors.slice(hosts=0, procs=rank)
            answer = self._send(mesh, "call_one", endpoint, args, kwargs)
        except FleetError as error:
            return _raised(error)
        return self.settle(answer, endpoint, deadline_s)

    def on_failure(self, callback: Callable[[Replica], None]) -> None:
        """Call `callback(replica)` once, on this event loop, when the replica fails (at once if it has)."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.failure is None:
                self._callbacks.append((loop, callback))
                return
        loop.call_soon(callback, self)

    def fail(self, error: FleetError) -> None:
        """Declare the replica failed (a supervisor does after missed deadlines). Only the first counts. Any thread."""
        with self._lock:
            if self.failure is not None or self.stopped:
                return
            self.failure = error
            waiting, self._waiting = self._waiting, set()
            callbacks, self._callbacks = self._callbacks, []
        for loop, callback in callbacks:  # first, so that who supervises knows before who called
            _soon(loop, callback, self)
        for loop, future in waiting:
            _soon(loop, lambda f=future: f.done() or f.set_result(None))

    async def stop(self, deadline_s: float = 5.0) -> None:
        """End its processes and their children. Pending calls raise. Safe to call twice and after a failure."""
        if self.stopped:
            return
        self.fail(PeerDied(self.name, "died", "it was stopped"))
        self.stopped = True
        self.fleet.forget(self)
        await self.host.kill(self.uid, deadline_s)

    def died(self, how: str) -> PeerDied:
        """The error for a death, with the last lines of its log."""
        last = self.last_lines()
        return PeerDied(self.name, "died", f"{how}; its log is {self.log}" + (f", ending in:\n{last}" if last else ""))

    def last_lines(self) -> str:
        """The end of what its processes have written."""
        return tail(self.log, self.logged)

    async def settle(self, answer: asyncio.Future[Any], what: str, deadline_s: float) -> Any:
        """Wait for `answer`, the deadline or the replica's failure, whichever is first."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        entry = (loop, failed)
        with self._lock:
            if self.failure is not None:
                failed.set_result(None)
            self._waiting.add(entry)
        try:
            await asyncio.wait({answer, failed}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with self._lock:
                self._waiting.discard(entry)
            if not answer.done():
                answer.add_done_callback(_seen)  # its late end is nobody's error
        if answer.done() and not answer.cancelled():
            return self._outcome(answer, what)
        if self.failure is not None:
            raise self.failure
        raise DeadlineExceeded(
            self.name,
            "hung",
            f"{what} gave no answer within {deadline_s:g} s; it may be stopped, stuck or slow; see {self.log}",
        )

    def _send(
        self, mesh: Any, how: str, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> asyncio.Future[Any]:
        self._check()
        try:
            return getattr(getattr(mesh, endpoint), how)(*args, **kwargs).as_asyncio()
        except SupervisionError as error:
            raise self._dead(error) from error

    def _dead(self, error: SupervisionError) -> FleetError:
        self.fail(self.died(str(error).strip()))
        return self.failure or PeerDied(self.name, "died", str(error))

    def _outcome(self, answer: asyncio.Future[Any], what: str) -> Any:
        error = answer.exception()
        if error is None:
            return answer.result()
        if isinstance(error, SupervisionError):
            raise self._dead(error) from error
        if isinstance(error, ActorError):
            remote = error.exception
            cause = f"{what} raised {type(remote).__name__}: {remote}\n{own_frames(error.exception_formatted)}"
            raise RemoteError(self.name, "raised", cause) from remote
        raise error

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.stopped:
            raise PeerDied(self.name, "died", "it was stopped")


async def _raised(error: FleetError) -> Any:
    raise error


def own_frames(trace: str) -> str:
    """A traceback's text without Monarch's frames and ours around the actor's method."""
    kept: list[str] = []
    skipping = False
    for line in trace.rstrip().splitlines():
        if line.startswith("  File "):
            skipping = any(part in line for part in ("/monarch/_src/", "/milkweed/fleet/monarch_compat.py"))
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _seen(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    """Run on `loop` from any thread; a loop that has been closed has nobody waiting."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)
