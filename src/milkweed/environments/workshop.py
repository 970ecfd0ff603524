"""Where environments run away from the controller: a process that many trajectories share, and its keeper.

    controller ── commands ──► Workshop ── pipe ──► the process: async def env(task, policy)
               ◄── events ────          ◄── pipe ──   policy.sample, rewards: asked for, answered by the controller

One thread keeps one process. A process that dies, hangs, takes too much memory, prints without end or starts too many
processes is killed with all it started; only the trajectories in it are lost, and said to be. Those that are tried again run in a
process of their own, so that one that always kills takes no others along twice. One in which a cancelled trajectory left
something running gets no new trajectories, and ends with its last.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import msgspec

from milkweed.environments import sandbox
from milkweed.types import Sampling, Trajectory

MAIN = Path(__file__).with_name("workshop_main.py")
KEPT = 16
FLOOD_S = 10.0
MAX_EVENT = 1 << 28


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Trajectory `id` wants a completion of `token_ids`, or (with `blob`) the reward function `key` scored."""

    id: int
    call: int
    token_ids: list[int] = []
    sampling: Sampling | None = None
    key: str = ""
    blob: bytes = b""
    payload: bytes = b""
    label: str = ""
    deadline_s: float | None = None


class Done(msgspec.Struct, tag=True, array_like=True):
    """What came of trajectory `id`: one of each player, or `error`, the name of what was raised, and its text."""

    id: int
    trajectories: list[Trajectory] = []
    several: bool = False
    error: str = ""
    text: str = ""


class Beat(msgspec.Struct, tag=True, array_like=True):
    """The process's event loop turns; `stained`: something that was cancelled is still running in it."""

    stained: bool = False


Event = Ask | Done | Beat
LOST = "lost"
"""`Done.error` of a trajectory whose process is gone."""

decode_event = msgspec.msgpack.Decoder(Event).decode
encode_event = msgspec.msgpack.Encoder().encode


class WorkshopLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process may use, all its trajectories together."""

    memory_bytes: int = 8 << 30
    """Resident, of the process itself."""
    processes: int = 1024
    """Alive at once below it."""
    output_bytes: int = 32 << 20
    """Printed within 10 seconds."""
    hang_s: float = 30.0
    """Its event loop may stand still for so long (an async environment that blocks)."""
    start_s: float = 120.0


class Workshop:
    """One process that new trajectories go to, and others that end with the trajectories they have."""

    def __init__(self, setup: bytes = b"", limits: WorkshopLimits | None = None) -> None:
        self.limits, self.setup = limits or WorkshopLimits(), setup
        self._functions: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Condition()
        self._events: list[bytes] = []
        self._keepers: set[_Keeper] = set()
        self._where: dict[int, _Keeper] = {}
        self._closed = False
        with self._lock:  # its thread asks at once whether it is the current one
            self._current = self._hire()

    def push(self, commands: list[tuple[Any, ...]], functions: dict[str, bytes]) -> None:
        """`("run", id, key, pickled (prompt, sampling), alone)`, `("reply", id, call, pickled (good, value))`, `("cancel", id)`;
        `functions` are pickled environments, sent before the first run that names them."""
        with self._lock:
            for key, blob in functions.items():
                self._functions[key] = blob
                self._functions.move_to_end(key)
            while len(self._functions) > KEPT:
                self._functions.popitem(last=False)
            touched = set()
            for command in commands:
                kind, id = command[0], command[1]
                if kind == "run":
                    keeper = self._where[id] = self._hire() if command[4] else self._current
                    keeper.jobs.add(id)
                    if command[2] not in keeper.known:
                        keeper.known.add(command[2])
                        keeper.outbox.append(("function", command[2], self._functions.get(command[2], b"")))
                else:
                    found = self._where.get(id)
                    if found is None:
                        continue  # it is lost, and that was said
                    keeper = found
                keeper.outbox.append(command)
                touched.add(keeper)
        for keeper in touched:
            keeper.wake()

    def pull(self, max_wait_s: float = 5.0) -> list[bytes]:
        """Events since the last call: waits for the first, then a moment for more. Empty after `max_wait_s`."""
        with self._lock:
            self._lock.wait_for(lambda: self._events or self._closed, max_wait_s)
        time.sleep(0.002)
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Kill every process with all it started, and wait for that. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            keepers = list(self._keepers)
        for keeper in keepers:
            keeper.wake()
        for keeper in keepers:
            keeper.thread.join(10.0)

    # ---- what keepers call, each from its thread

    def _hire(self) -> _Keeper:
        keeper = _Keeper(self)
        self._keepers.add(keeper)
        keeper.thread.start()
        return keeper

    def said(self, keeper: _Keeper, events: list[tuple[Event, bytes]]) -> None:
        with self._lock:
            for event, data in events:
                if isinstance(event, Done):
                    keeper.jobs.discard(event.id)
                    self._where.pop(event.id, None)
                if isinstance(event, Beat):
                    if event.stained and keeper is self._current:
                        self._current = self._hire()
                elif isinstance(event, Done) or event.id in keeper.jobs:
                    self._events.append(data)
            self._lock.notify_all()

    def lost(self, keeper: _Keeper, reason: str) -> None:
        """Its process is gone."""
        with self._lock:
            for id in keeper.jobs:
                self._where.pop(id, None)
                self._events.append(encode_event(Done(id, error=LOST, text=reason)))
            self._keepers.discard(keeper)
            if keeper is self._current and not self._closed:
                self._current = self._hire()
            self._lock.notify_all()

    def wanted(self, keeper: _Keeper) -> bool:
        with self._lock:
            return not self._closed and (bool(keeper.jobs) or keeper is self._current)


class _Gone(Exception):
    pass


class _Keeper:
    """One process and the thread that keeps it."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.jobs: set[int] = set()
        self.known: set[str] = set()
        self.outbox: deque[tuple[Any, ...]] = deque([("setup", shop.setup)])
        self._news = os.eventfd(0, os.EFD_NONBLOCK)
        self._printed: deque[tuple[float, int]] = deque()
        self._tail: deque[bytes] = deque(maxlen=4)
        self.thread = threading.Thread(target=self._run, name="environment keeper", daemon=True)

    def wake(self) -> None:
        try:
            os.eventfd_write(self._news, 1)
        except OSError:
            pass  # its thread has ended

    def _run(self) -> None:
        reason, begun = "was given up when its pool closed", time.monotonic()
        try:
            self._start()
            begun = time.monotonic()
            self._keep()
        except Exception as error:  # told with every trajectory that it takes along
            reason = str(error) if isinstance(error, _Gone) else f"could not be kept: {type(error).__name__}: {error}"
            sys.stderr.write(f"milkweed: environment process {reason}\n")
            if time.monotonic() - begun < 1.0 and not self.jobs:
                time.sleep(1.0)  # one that cannot start is not started in a circle
        finally:
            self._kill()
            self.shop.lost(self, reason)
            os.close(self._news)

    def _start(self) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        self._out, output = os.pipe()
        limits = self.shop.limits
        numbers = [to_child, from_child, os.getpid(), limits.memory_bytes]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", str(MAIN), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(to_child, from_child),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        finally:
            for fd in (to_child, from_child, output):
                os.close(fd)
        self._pidfd = os.pidfd_open(self._process.pid)
        for fd in (self._to, self._from, self._out):
            os.set_blocking(fd, False)

    def _keep(self) -> None:
        limits, pid = self.shop.limits, self._process.pid
        poll = select.poll()
        for fd in (self._from, self._out, self._pidfd, self._news):
            poll.register(fd, select.POLLIN)
        begun, beat, checked, out, inside = time.monotonic(), None, 0.0, b"", bytearray()
        while self.shop.wanted(self):
            if not out and self.outbox:
                with self.shop._lock:
                    batch, self.outbox = self.outbox, deque()
                out = b"".join(map(_frame, batch))
            if out:
                poll.register(self._to, select.POLLOUT)
            ready = dict(poll.poll(500))
            if self._news in ready:
                os.eventfd_read(self._news)
            if self._to in ready:
                try:
                    out = out[os.write(self._to, out[: 1 << 20]) :]
                except BrokenPipeError:
                    raise self._ended() from None
                if not out:
                    poll.unregister(self._to)
            if self._out in ready:
                self._drain(limits.output_bytes)
            if self._from in ready:
                data = os.read(self._from, 1 << 20)
                if not data:
                    raise self._ended()
                inside += data
                events = list(_events(inside))
                beat = time.monotonic() if any(isinstance(e, Beat) for e, _ in events) else beat
                self.shop.said(self, events)
            elif self._pidfd in ready:
                raise self._ended()
            now = time.monotonic()
            if beat is None and now - begun > limits.start_s:
                raise _Gone(f"did not start within {limits.start_s:g} s")
            if beat is not None and now - beat > limits.hang_s:
                raise _Gone(f"hung: its event loop stood still for {limits.hang_s:g} s")
            if now - checked > 0.5:
                checked = now
                self._measure(pid)

    def _measure(self, pid: int) -> None:
        limits, below = self.shop.limits, sandbox.descendants(pid, self.shop.limits.processes + 8)
        if len(below) - 2 > limits.processes:
            raise _Gone(f"was killed: it started more than {limits.processes} processes")
        for one in below[:3]:  # the guards and the process itself
            try:
                with open(f"/proc/{one}/statm") as file:
                    resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                continue  # it ended just now
            if resident > limits.memory_bytes:
                raise _Gone(f"was killed: it took more than {limits.memory_bytes >> 20} MiB")

    def _drain(self, most: int) -> None:
        try:
            data = os.read(self._out, 1 << 20)
        except BlockingIOError:
            return
        now = time.monotonic()
        self._tail.append(data[-1024:])
        self._printed.append((now, len(data)))
        while self._printed and now - self._printed[0][0] > FLOOD_S:
            self._printed.popleft()
        if sum(n for _, n in self._printed) > most:
            raise _Gone(f"was killed: it printed more than {most >> 20} MiB within {FLOOD_S:g} s")

    def _ended(self) -> _Gone:
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return _Gone("closed its own pipes")
        try:
            self._drain(1 << 40)
        except OSError:
            pass  # nothing more to read
        last = b"".join(self._tail).decode("utf-8", "replace").strip().splitlines()[-3:]
        number = -code if code < 0 else code - 128 if code > 128 else 0
        how = f"by {signal.Signals(number).name}" if 0 < number < 65 else f"with exit code {code}"
        return _Gone(f"ended {how}" + (f", saying {' / '.join(last)[:300]!r}" if last else ""))

    def _kill(self) -> None:
        if not hasattr(self, "_pidfd"):
            return
        sandbox.kill_descendants(self._process.pid)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # stuck in the kernel; its guard's parent-death signal has the rest
            sys.stderr.write(f"milkweed: environment process {self._process.pid} did not end within 5 s of SIGKILL\n")
        for fd in (self._to, self._from, self._out, self._pidfd):
            os.close(fd)


def _frame(command: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(command, 5)
    return struct.pack("<I", len(body)) + body


def _events(inside: bytearray) -> Any:
    """Takes whole events out of what was read. Raises _Gone for what is none."""
    while len(inside) >= 4:
        size = struct.unpack_from("<I", inside)[0]
        if size > MAX_EVENT:
            raise _Gone("wrote into its own pipe")
        if len(inside) < 4 + size:
            return
        data = bytes(inside[4 : 4 + size])
        del inside[: 4 + size]
        try:
            yield decode_event(data), data
        except msgspec.DecodeError as error:
            raise _Gone(f"wrote into its own pipe ({error})") from None
