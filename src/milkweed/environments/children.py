"""Children that run reward functions, from their owner's side: a pool that scores, and kills what passes its deadline.

One thread owns one child for life (its parent-death signal hangs on the thread): a slow item holds up one child only.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from milkweed.environments import sandbox
from milkweed.environments.items import Item, Outcome

CHILD = Path(__file__).with_name("child.py")
MAX_REPLY = 1 << 24
KEPT = 16
"""Functions kept, those used last. Whoever submits may leave out half as many."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one child may use. An item that goes beyond ends with its child; the next item gets a new one."""

    memory_bytes: int = 4 << 30
    """Data of one process."""
    processes: int = 256
    """Alive at once below one child."""
    output_bytes: int = 8 << 20
    """Printed during one item."""
    start_s: float = 60.0
    """To start a child or to load a function, imports included."""
    namespace: bool = True
    """Use a PID namespace where the kernel lends one; without it a fork bomb that hides is chased, not cut off."""
    overruns: int = 8
    """Deadlines missed running by one function before what is queued for it is given up."""


class Failed(Exception):
    """An item failed for the reason in `str(self)`; `died` where its child is gone."""

    def __init__(self, reason: str, trace: str = "", *, died: bool = True, overran: bool = False) -> None:
        super().__init__(reason)
        self.trace, self.died, self.overran = trace, died, overran


class Child:
    """One process, its session, and all that it starts. Use from one thread, which must outlive it."""

    def __init__(self, limits: Limits) -> None:
        """Starts it. Raises Failed if it does not say hello in time."""
        self._limits = limits
        self._functions: OrderedDict[str, None] = OrderedDict()  # oldest use first
        self._tail: deque[bytes] = deque(maxlen=16)
        self._printed = 0
        self._in = bytearray()
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        self._out, output = os.pipe()
        arguments = [to_child, from_child, os.getpid(), limits.memory_bytes, limits.processes, int(limits.namespace)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", str(CHILD), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(to_child, from_child),
                start_new_session=True,
            )
        except OSError:
            for fd in (self._to, self._from, self._out):
                os.close(fd)
            raise
        finally:
            for fd in (to_child, from_child, output):
                os.close(fd)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        for fd in (self._to, self._from, self._out):
            os.set_blocking(fd, False)
        self.isolated = False
        try:
            hello = self._exchange(None, limits.start_s, "did not start within its deadline")
            self.isolated = bool(hello[1])
            self._exchange(("path", sys.path), limits.start_s, "did not start within its deadline", answer=False)
        except BaseException:
            self.kill()
            raise

    def load(self, key: str, blob: bytes) -> None:
        """Make sure that the child has the function. Raises Failed."""
        if key in self._functions:
            self._functions.move_to_end(key)
            return
        dropped = self._functions.popitem(last=False)[0] if len(self._functions) >= KEPT else None
        message = ("function", key, blob, dropped)
        self._result(self._exchange(message, self._limits.start_s, "could not be loaded within its deadline"))
        self._functions[key] = None

    def score(self, key: str, payload: bytes, deadline_s: float) -> tuple[float, dict[str, float]]:
        """Raises Failed; after one that `died` this child is of no more use."""
        reply = self._result(self._exchange(("score", key, payload), deadline_s, "passed its deadline"))
        return reply[1], reply[2]

    def _result(self, reply: tuple[Any, ...]) -> tuple[Any, ...]:
        if reply[0] == "error":  # a process that met its memory limit stays close to it
            raise Failed(reply[1], reply[2], died="MemoryError" in reply[1])
        return reply

    def _exchange(
        self, message: tuple[Any, ...] | None, deadline_s: float, late: str, answer: bool = True
    ) -> tuple[Any, ...]:
        """Send and await the answer, whatever the child does meanwhile. Raises Failed."""
        start = time.monotonic()
        body = b"" if message is None else pickle.dumps(message, 5)
        out = memoryview(struct.pack("<I", len(body)) + body if message is not None else b"")
        self._printed = 0
        poll = select.poll()
        for fd in (self._from, self._out, self._pidfd):
            poll.register(fd, select.POLLIN)
        if out:
            poll.register(self._to, select.POLLOUT)
        while out or answer:
            left = start + deadline_s - time.monotonic()
            if left <= 0:
                raise Failed(f"{late} of {deadline_s:g} s", overran=True)
            ready = dict(poll.poll(min(left, 0.1) * 1000))
            if not ready and time.monotonic() - start > 0.05:
                count = len(sandbox.descendants(self.pid, self._limits.processes + 8)) - 2
                if count > self._limits.processes:
                    raise Failed(f"started more than {self._limits.processes} processes")
            if self._to in ready:
                try:
                    out = out[os.write(self._to, out) :]
                except BrokenPipeError:
                    raise self._ended() from None
                if not out:
                    poll.unregister(self._to)
            if self._out in ready:
                self._drain()
            if self._from in ready and self._receive(poll):
                size = struct.unpack_from("<I", self._in)[0]
                reply = pickle.loads(bytes(self._in[4 : 4 + size]))
                del self._in[: 4 + size]
                return reply
            if self._pidfd in ready and self._from not in ready:
                raise self._ended()
        return ()

    def _receive(self, poll: Any) -> bool:
        """Read what there is; True when a whole answer is in."""
        try:
            data = os.read(self._from, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            raise self._ended()
        self._in += data
        if len(self._in) < 4:
            return False
        size = struct.unpack_from("<I", self._in)[0]
        if size > MAX_REPLY:
            raise Failed("wrote into its process's own pipe")
        return len(self._in) >= 4 + size

    def _drain(self) -> None:
        try:
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        self._printed += len(data)
        self._tail.append(data[-2048:])
        if self._printed > self._limits.output_bytes:
            raise Failed(f"printed more than {self._limits.output_bytes >> 20} MiB")

    def _ended(self) -> Failed:
        """Say how it ended; kills what is left of it first, so that it has."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.signal_all()
            return Failed("closed its process's own pipes")
        try:
            self._drain()
        except Failed:
            pass  # it is gone already, for a better reason
        last = b"".join(self._tail).decode("utf-8", "replace").strip().splitlines()[-3:]
        number = -code if code < 0 else code - 128 if code > 128 else 0
        how = f"by {signal.Signals(number).name}" if 0 < number < 65 else f"with exit code {code}"
        return Failed(f"process ended {how}" + (f", saying {' / '.join(last)[:300]!r}" if last else ""))

    def kill(self) -> None:
        """End it with everything it started, and wait for that."""
        self.signal_all()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # stuck in the kernel; its guard's parent-death signal has the rest
            sys.stderr.write(f"milkweed: reward child {self.pid} did not end within 5 s of SIGKILL\n")
        for fd in (self._to, self._from, self._out, self._pidfd):
            os.close(fd)

    def signal_all(self) -> None:
        """SIGKILL it and all it started; does not wait. From any thread."""
        if self._process.poll() is None:
            if not self.isolated:
                sandbox.kill_descendants(self.pid)
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended between the two lines


class ScoringPool:
    """`children` processes and a queue. Every item submitted comes back once from `collect`, scored or failed."""

    def __init__(self, children: int = 2, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._functions: OrderedDict[str, bytes] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._done: list[Outcome] = []
        self._cancelled: set[int] = set()
        self._overran: dict[str, int] = {}
        self._given_up: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._busy_s = self._busy_since = self._idle_at = 0.0
        self._running = self._scored = self._failed = 0
        self._last_id = 0
        self._children: dict[int, Child] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"reward-child-{i}", daemon=True)
            for i in range(children)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, items: Sequence[Item], functions: Mapping[str, bytes] | None = None, cancel: Sequence[int] = ()
    ) -> None:
        """Queue `items`; ids must grow. `functions` are pickled functions by key, sent before their first use;
        `cancel` names items whose outcome nobody waits for any more."""
        with self._changed:
            self._functions.update(functions or {})
            for item in items:
                self._waiting[item.function] += 1
                if item.function in self._functions:
                    self._functions.move_to_end(item.function)
            for key in list(self._functions)[:-KEPT]:
                if not self._waiting[key]:
                    del self._functions[key], self._waiting[key]
                    self._overran.pop(key, None)
                    self._given_up.pop(key, None)
            if not +self._waiting:
                self._cancelled.clear()  # what came too late to cancel anything
            self._cancelled.update(cancel)
            self._last_id = max([self._last_id, *(i.id for i in items)])
        for item in items:
            self._queue.put(item)

    def collect(self, max_wait_s: float = 5.0, linger_s: float = 0.005) -> list[Outcome]:
        """Outcomes since the last call: waits for the first, then a moment for more while there are any to come. Empty
        after `max_wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._closing.is_set(), max_wait_s)
            if self._done:
                self._changed.wait_for(lambda: self._closing.is_set() or not any(self._waiting.values()), linger_s)
            done, self._done = self._done, []
        return done

    def stats(self) -> dict[str, float]:
        """`busy_s` (seconds with an item running), `idle_at` (Unix time when the last ended), `scored`, `failed`..."""
        with self._changed:
            busy = self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
            times = {"busy_s": busy, "idle_at": self._idle_at}
            return times | {"scored": self._scored, "failed": self._failed, "children": len(self._children)}

    def collect_stats(self, max_wait_s: float = 5.0) -> tuple[list[Outcome], dict[str, float]]:
        """`collect` and `stats` in one answer."""
        return self.collect(max_wait_s), self.stats()

    def close(self) -> None:
        """Kill every child with all it started, and wait for that. Safe to call twice."""
        self._closing.set()
        for _ in self._threads:
            self._queue.put(None)
        for child in list(self._children.values()):
            child.signal_all()  # wakes the thread that waits on it
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(10.0)

    def _run(self, index: int) -> None:
        try:
            self._start(index, quiet=True)
            while (item := self._queue.get()) is not None and not self._closing.is_set():
                with self._changed:
                    if not self._running:
                        self._busy_since = time.monotonic()
                    self._running += 1
                outcome = Outcome(item.id, error="was given up when its pool closed")
                try:
                    outcome = self._one(index, item)
                finally:
                    self._finish(item, outcome)
                if index not in self._children and not self._closing.is_set():
                    self._start(index, quiet=True)  # now, so that the next item does not wait for an interpreter
        finally:
            self._end(index)

    def _start(self, index: int, quiet: bool = False) -> Child:
        """A new child. `quiet` leaves a failure to the next item, which tries again and carries the reason."""
        try:
            self._children[index] = Child(self.limits)
        except (Failed, OSError):
            if not quiet:
                raise
        return self._children.get(index)  # type: ignore[return-value]

    def _end(self, index: int) -> None:
        child = self._children.pop(index, None)
        if child is not None:
            child.kill()

    def _one(self, index: int, item: Item) -> Outcome:
        """Score one item; its child is gone afterwards if it is fit for no other."""
        if item.id in self._cancelled:
            self._cancelled.discard(item.id)
            return Outcome(item.id, error="was cancelled")
        if item.id <= self._given_up.get(item.function, -1):
            count = self.limits.overruns
            return Outcome(item.id, error=f"was not tried after {count} deadlines missed running: its function hangs")
        if item.function not in self._functions:
            return Outcome(item.id, error="function never reached its worker")
        try:
            child = self._children.get(index) or self._start(index)
            child.load(item.function, self._functions[item.function])
            reward, parts = child.score(item.function, item.payload, item.deadline_s)
        except Failed as error:
            self._count(item, error.overran)
            if error.died:
                self._end(index)
            return Outcome(item.id, error=str(error), trace=error.trace)
        except OSError as error:
            self._end(index)
            return Outcome(item.id, error=f"process did not start: {error}")
        self._count(item, False)
        return Outcome(item.id, reward=reward, parts=parts)

    def _count(self, item: Item, overran: bool) -> None:
        with self._changed:
            if not overran:
                self._overran[item.function] = 0
                return
            count = self._overran[item.function] = self._overran.get(item.function, 0) + 1
            if count >= self.limits.overruns:  # what is submitted later gets one try before it is given up too
                self._given_up[item.function] = self._last_id
                self._overran[item.function] = self.limits.overruns - 1

    def _finish(self, item: Item, outcome: Outcome) -> None:
        with self._changed:
            self._running -= 1
            self._waiting[item.function] -= 1
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since
                self._idle_at = time.time()
            self._scored += outcome.error is None
            self._failed += outcome.error is not None
            self._done.append(outcome)
            self._changed.notify_all()
