"""One host of a fleet as the controller sees it: its keeper, the worker under it, and what the keeper reports."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from milkweed.errors import DeadlineExceeded, PeerDied
from milkweed.fleet import monarch_compat, processes

WIDEST = 500
"""Characters of a log's line that an error shows: SGLang writes all of its arguments in one of twenty thousand."""
KEEPER = Path(__file__).with_name("keeper.py")
SERVE = "import sys; from milkweed.fleet.monarch_compat import serve_host; serve_host(sys.argv[1])"


class Host:
    """`index` in the mesh, `log` of the keeper and the worker, `mesh` (Monarch's host mesh), `lost` once it is gone.

    A thread reads the keeper's reports, so that leftovers of a killed keeper are swept even while the controller's loop
    is busy.
    """

    def __init__(self, index: int, folder: Path, token: str, log: Path, *, address: str) -> None:
        self.index, self.folder, self.token, self.log = index, folder, token, log
        self.name = f"host{index}"
        self.address = f"ipc://{folder}/{address}"
        self.mesh: Any = None
        self.lost: str | None = None
        self.leaving = False
        """It is about to be taken away: nothing new is put on it."""
        self.noticed = False
        """Its keeper was told so by a signal."""
        self.on_exit: Callable[[str, int, str], None] = lambda name, pid, how: None
        self.on_stopped: Callable[[str, int], None] = lambda name, pid: None
        self.on_notice: Callable[[Host], None] = lambda host: None
        self.on_lost: Callable[[Host, str], None] = lambda host, why: None
        self.stopping = False
        self._ended = threading.Event()
        self._killed: dict[str, threading.Event] = {}
        self._launched: dict[str, tuple[int, str]] = {}
        self._keeper: subprocess.Popen[bytes] | Adopted | None = None
        self._write = threading.Lock()

    def launch(self, environment: Mapping[str, str], grace_s: float = 0.0) -> None:
        """Start the keeper, and under it the worker. What the keeper launches itself waits `grace_s` for an heir of ours."""
        me = processes.me()
        owner = [str(me["pid"]), str(me["started"]), str(grace_s)]
        worker = [sys.executable, "-P", "-c", SERVE, self.address]
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                # -S -E: no site packages, no PYTHON* variables: nothing that a user's set-up could break
                [sys.executable, "-S", "-E", str(KEEPER), str(self.folder), self.token, self.name, *owner, *worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment) | {processes.HOST_VAR: self.name},
                start_new_session=True,  # the terminal's Ctrl-C is for the controller
            )
        threading.Thread(target=self._listen, name=f"milkweed-{self.name}", daemon=True).start()

    def adopt(self, environment: Mapping[str, str], within_s: float = 8.0) -> dict[str, int]:
        """Take over from a controller that died: its keeper starts a worker for this one. Returns what it has kept, the
        first process of each replica by its uid. Blocks. Raises PeerDied (lost) where no keeper waits."""
        worker = [sys.executable, "-P", "-c", SERVE, self.address]
        env = dict(environment) | {processes.HOST_VAR: self.name}
        self._keeper = Adopted(self.folder, self.name, within_s)
        line = self._keeper.greet({"token": self.token, "command": worker, "env": env} | processes.me(), within_s)
        kept: dict[str, int] = json.loads(line)["kept"]
        threading.Thread(target=self._listen, name=f"milkweed-{self.name}", daemon=True).start()
        return kept

    async def attach(self, deadline_s: float) -> None:
        """Connect to the worker. Raises PeerDied or DeadlineExceeded (kind `refused`)."""
        self.mesh = monarch_compat.attach(self.address, self.name)
        ready = asyncio.ensure_future(self.mesh.initialized.as_asyncio())
        end = asyncio.get_running_loop().time() + deadline_s
        while not ready.done():
            await asyncio.wait({ready}, timeout=0.1)
            if self.lost:
                raise PeerDied(self.name, "refused", f"{self.lost}\n{tail(self.log)}")
            if not ready.done() and asyncio.get_running_loop().time() > end:
                raise DeadlineExceeded(
                    self.name,
                    "refused",
                    f"the worker did not come up in {deadline_s:g} s; see {self.log}\n{tail(self.log)}",
                )
        try:
            ready.result()
        except Exception as error:  # Monarch raises plain exceptions of many kinds here
            raise PeerDied(self.name, "refused", f"{error}\n{tail(self.log)}") from error

    async def start_process(self, name: str, command: list[str], environment: Mapping[str, str], log: Path, deadline_s: float = 10.0) -> int:
        """A process of the keeper's own, which outlives the controller where the mesh says so. Returns its id. Raises
        PeerDied or DeadlineExceeded (kind `refused`)."""
        self._order(launch=name, command=command, env=dict(environment), log=str(log))
        end = asyncio.get_running_loop().time() + deadline_s
        while name not in self._launched:
            if self.lost:
                raise PeerDied(name, "refused", self.lost)
            if asyncio.get_running_loop().time() > end:
                raise DeadlineExceeded(name, "refused", f"the keeper of {self.name} did not start it in {deadline_s:g} s")
            await asyncio.sleep(0.01)
        pid, how = self._launched.pop(name)
        if not pid:
            raise PeerDied(name, "refused", f"it could not be started: {how}")
        return pid

    def watch(self, name: str, pids: list[int]) -> None:
        """Report (`on_exit`) as soon as one of these processes ends."""
        self._order(watch=name, pids=pids)

    def kill_soon(self, name: str) -> None:
        """Order the end of a replica's processes without waiting for it. Any thread."""
        self._order(kill=name)

    async def kill(self, name: str, deadline_s: float = 5.0) -> None:
        """Kill every process of a replica, its children too. Returns once they are gone, or at the deadline: what
        is left then is killed when the host stops."""
        if self.lost:
            return
        done = self._killed.setdefault(name, threading.Event())
        self._order(kill=name)
        await asyncio.to_thread(done.wait, deadline_s)

    def stop(self, within_s: float = 8.0) -> None:
        """End the host: everything on it is killed, its shared memory removed. Blocks."""
        self.stopping = True
        if self._keeper is None:
            return
        self._order(stop=True)
        if not self._ended.wait(within_s):
            # only a keeper that is itself stopped or stuck comes here
            self._keeper.kill()
            self._ended.wait(5.0)
        try:
            self._keeper.wait(5.0)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(self.name, "hung", f"keeper {self._keeper.pid} does not die") from error

    def _order(self, **order: Any) -> None:
        assert self._keeper is not None and self._keeper.stdin is not None
        data = (json.dumps(order) + "\n").encode()
        with self._write:
            try:
                self._keeper.stdin.write(data)
                self._keeper.stdin.flush()
            except (BrokenPipeError, ValueError):
                return  # it is gone; the listener finds that out and reports it

    def _listen(self) -> None:
        assert self._keeper is not None and self._keeper.stdout is not None
        bye = False
        for line in self._keeper.stdout:
            event = json.loads(line)
            if "exit" in event:
                self.on_exit(event["exit"], event["pid"], event["how"])
            elif "stopped" in event:
                self.on_stopped(event["stopped"], event["pid"])
            elif "notice" in event:
                self.noticed = True
                self.on_notice(self)
            elif "killed" in event:
                self._killed.setdefault(event["killed"], threading.Event()).set()
            elif "launched" in event:
                self._launched[event["launched"]] = (event["pid"], event["how"])
            elif "host_exit" in event:
                self._lose(f"its worker process ended {event['host_exit']}".rstrip())
            elif "bye" in event:
                bye = True
        if not bye:
            # killed from outside: its worker dies with it, but not what the replicas started
            processes.sweep_processes(self.folder, self.token, self.name)
            processes.leave(self.folder, self.token, self.name)
            self._lose("its keeper process was killed")
        self._ended.set()

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = f"host {self.name} is gone: {why}"
            if not self.stopping:
                self.on_lost(self, self.lost)


class Adopted:
    """The keeper of a controller that died, as `subprocess.Popen` would show it."""

    def __init__(self, folder: Path, host: str, within_s: float) -> None:
        """Waits for the keeper to wait. Raises PeerDied (lost)."""
        end = time.monotonic() + within_s
        self.pid = self._started = 0
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(max(0.1, end - time.monotonic()))
            try:
                found = json.loads((folder / f"keeper-{host}.json").read_text())
                self.pid, self._started = found["pid"], found["started"]
                self._socket.connect(str(folder / f"adopt-{host}"))
                break
            except OSError as error:
                self._socket.close()
                if time.monotonic() > end or not (isinstance(error, FileNotFoundError) and processes.alive(self.pid, self._started)):
                    raise PeerDied(host, "lost", f"no keeper of a former life waits for this one ({error})") from error
                time.sleep(0.05)
        self.stdin, self.stdout = self._socket.makefile("wb"), self._socket.makefile("rb")

    def greet(self, who: dict[str, Any], within_s: float) -> bytes:
        """Its answer. Raises PeerDied (lost) where it gives none."""
        self._socket.settimeout(within_s)
        try:
            self.stdin.write(json.dumps(who).encode() + b"\n")
            self.stdin.flush()
            line = self.stdout.readline()
        except OSError as error:
            raise PeerDied("host", "lost", f"keeper {self.pid} of a former life does not answer: {error}") from error
        if not line:
            raise PeerDied("host", "lost", f"keeper {self.pid} of a former life refuses this one's token")
        self._socket.settimeout(None)
        return line

    def kill(self) -> None:
        if processes.alive(self.pid, self._started):
            processes.kill([self.pid])

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while processes.alive(self.pid, self._started):
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("keeper", timeout)
            time.sleep(0.02)


def tail(log: Path, since: int = 0, lines: int = 20) -> str:
    """The last lines of a log, for an error's text; `since` is the byte where what matters begins."""
    try:
        with log.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(since, f.tell() - 16384))
            text = f.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(line if len(line) <= WIDEST else f"{line[:WIDEST]} ..." for line in text.splitlines()[-lines:])
