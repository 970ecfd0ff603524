"""The keeper of one host: a small process that owns every process of a fleet there and lets none outlive it.

Run by path as `keeper.py FOLDER TOKEN HOST CONTROLLER_PID CONTROLLER_STARTED GRACE_S COMMAND...`; standard library only.

It is a subreaper: what loses its parent becomes its child. It holds a lease, the pipe on its standard input, and
watches the controller's process as well (a fork of the controller may hold the pipe open). When either ends, or it is
told to stop, it kills all descendants, removes what they left in /dev/shm and the folder, and exits.

What it was told to `launch` itself is its own child and no worker's. With GRACE_S above 0 that outlives the controller: the
keeper kills all else and waits so long at the socket `adopt-HOST` in the folder for a line of JSON from an heir: `{"token":,
"pid":, "started":, "command":, "env":}`, a new controller and how to start its worker. The socket is the lease then.

Lines of JSON come in: `{"watch": name, "pids": []}`, `{"kill": name}`, `{"launch": name, "command": [], "env": {}, "log":
path}`, `{"stop": true}`; and go out: `{"up": pid, "kept": {name: pid}}`, `{"launched": name, "pid": n, "how": words}`,
`{"exit": name, "pid": n, "how": words}`, `{"stopped": name, "pid": n}` (for STOPPED_S already), `{"notice": true}` (SIGTERM came), `{"killed": name, "count": n}`, `{"host_exit": how}`, `{"bye": true}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import processes  # noqa: E402  (loaded by path: the package must not be imported here)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_EVERY_S = 1.0
KILL_WITHIN_S = 4.0
STOPPED_S = 4.0


def prctl(option: int, value: int) -> None:
    """Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


class Keeper:
    def __init__(self, folder: Path, token: str, host: str, controller: int, started: int, grace_s: float, command: list[str]) -> None:
        self.folder, self.token, self.host, self.grace_s = folder, token, host, grace_s
        self.launched: dict[str, subprocess.Popen[bytes]] = {}
        self.endings: dict[int, str] = {}
        self.told = False  # to stop, for good
        self.terminated = self.warned = 0
        self.family = processes.Family(os.getpid(), token)
        self.watched: dict[int, tuple[str, int]] = {}  # pidfd -> (replica, pid)
        self.condemned: set[str] = set()  # replicas told to die: their late-comers die too
        self.written: object = None
        # process -> its ticks, and since when it has been stopped with no more of them; inf once that is said. One that is
        # continued between two looks, as programs that hold others down do, is slow
        self.stopped: dict[int, tuple[int, float]] = {}
        self.inbox = b""
        self.poll = select.poll()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        processes.note(folder / f"keeper-{host}.json", processes.me())
        self.poll.register(0, select.POLLIN | select.POLLHUP)
        self.controller = self.open(controller, started)
        self.worker = self.child(command, None, sys.stderr)
        self.say(up=self.worker.pid, kept={})

    def child(self, command: list[str], env: dict[str, str] | None, out: object) -> subprocess.Popen[bytes]:
        """One that outlived the keeper would be nobody's: the kernel kills it, and it kills its own."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,  # type: ignore[call-overload]
            stderr=out,
            env=env,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def open(self, pid: int, started: int) -> int:
        """A descriptor that becomes readable when the process ends; -1 if it has ended."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return -1
        if not processes.alive(pid, started):
            os.close(fd)
            return -1
        self.poll.register(fd, select.POLLIN)
        return fd

    def say(self, **event: object) -> None:
        try:
            os.write(1, (json.dumps(event) + "\n").encode())
        except (BrokenPipeError, BlockingIOError):
            self.deaf = True  # nobody listens; the lease will tell why

    def run(self) -> None:
        """Serve until the lease ends with no heir or `stop` comes, then leave nothing behind."""
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.ended = self.controller == -1
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", self.terminated + 1))
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self.poll.register(wake, select.POLLIN)
        self.serve(wake)
        while not self.told and self.inherit():
            self.serve(wake)
        self.finish()

    def end(self) -> None:
        self.told = self.ended = True

    def warn(self) -> None:
        """The first SIGTERM says that the host is about to be taken away; a second one ends it."""
        if self.terminated > 1:
            self.end()
        elif self.terminated > self.warned:
            self.warned = 1
            self.say(notice=True)

    def serve(self, wake: int) -> None:
        looked = 0.0
        while not self.ended:
            ready = self.poll.poll(int(LOOK_EVERY_S * 1000))
            # first the worker: where it died, its replicas died of that, and not each for a cause of its own
            self.collect()
            self.warn()
            for fd, _ in ready if not self.ended else ():
                if fd == 0:
                    self.listen()
                elif fd == self.controller:
                    self.ended = True
                elif fd == wake:
                    os.read(wake, 4096)
                elif fd in self.watched:
                    self.gone(fd)
            if time.monotonic() - looked > LOOK_EVERY_S:
                looked = time.monotonic()
                self.look()

    def listen(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self.ended = True
            return
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "stop" in order:
                self.end()
            elif "launch" in order:
                self.launch(order["launch"], order["command"], order["env"], order["log"])
            elif "watch" in order:
                self.watch(order["watch"], order["pids"])
            elif "kill" in order:
                self.condemned.add(order["kill"])
                self.say(killed=order["kill"], count=self.destroy(order["kill"].__eq__, self.collect))

    def launch(self, name: str, command: list[str], env: dict[str, str], log: str) -> None:
        try:
            with open(log, "ab") as out:
                self.launched[name] = self.child(command, env, out)
        except OSError as error:
            self.say(launched=name, pid=0, how=str(error))
        else:
            self.say(launched=name, pid=self.launched[name].pid, how="")

    def watch(self, name: str, pids: list[int]) -> None:
        self.look()
        for pid in pids:
            p = processes.read(pid)
            fd = -1 if p is None else self.open(pid, p.started)
            if fd == -1:
                self.say(exit=name, pid=pid, how=self.ending(pid))
            else:
                self.watched[fd] = (name, pid)

    def gone(self, fd: int) -> None:
        name, pid = self.watched.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        self.say(exit=name, pid=pid, how=self.ending(pid))

    def ending(self, pid: int) -> str:
        return self.endings.pop(pid, "") or processes.ending(pid)

    def look(self) -> None:
        members = self.family.look()
        known = sorted((pid, m[0]) for pid, m in members.items())
        processes.kill(pid for pid, (_, owner) in members.items() if owner in self.condemned)
        now = time.monotonic()
        known_stops = self.stopped
        self.stopped = {
            pid: known_stops[pid] if pid in known_stops and known_stops[pid][0] == ticks else (ticks, now)
            for pid, ticks in self.family.stopped.items()
        }
        for pid, (ticks, since) in self.stopped.items():
            if now - since > STOPPED_S and members[pid][1]:
                self.stopped[pid] = (ticks, float("inf"))
                self.say(stopped=members[pid][1], pid=pid)
        if known != self.written:
            processes.note(self.folder / f"known-{self.host}.json", known)
            self.written = known

    def collect(self) -> None:
        """Reap the dead. The worker's end is the host's end; orphans of replicas come here too."""
        dead = processes.reap()
        # those launched here are reaped here, before their descriptor says that they have ended
        self.endings |= {child.pid: dead[child.pid] for child in self.launched.values() if child.pid in dead}
        if self.worker.pid in dead:
            self.say(host_exit=dead[self.worker.pid])
            self.end()

    def destroy(self, doomed: Callable[[str], bool], reap: Callable[[], object] = processes.reap) -> int:
        """Kill all that belongs to such replicas, and what is forked meanwhile."""
        killed: set[int] = set()
        names: set[str] = set()
        end = time.monotonic() + KILL_WITHIN_S
        while True:
            pids = [pid for pid, (_, owner) in self.family.look().items() if doomed(owner)]
            if not pids or time.monotonic() > end:
                break
            names |= processes.library_shm(pids)
            processes.kill(pids)
            killed.update(pids)
            time.sleep(0.02)
            reap()
        processes.remove_named(names)
        return len(killed)

    def inherit(self) -> bool:
        """Whether a new controller has taken over what was launched. Everything else is killed first."""
        kept = {name: child.pid for name, child in self.launched.items() if name not in self.condemned and processes.lives(child.pid)}
        if not self.grace_s or not kept:
            return False
        self.destroy(lambda owner: owner not in kept)
        for fd in self.watched:
            self.poll.unregister(fd)
            os.close(fd)
        self.watched.clear()
        if self.controller != -1:
            self.poll.unregister(self.controller)
            os.close(self.controller)
        path = self.folder / f"adopt-{self.host}"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
            door.listen(4)
            door.settimeout(0.25)
            until = time.monotonic() + self.grace_s
            while time.monotonic() < until and not self.terminated:
                try:
                    heir, _ = door.accept()
                except TimeoutError:
                    processes.reap()
                    continue
                with heir:
                    if self.taken_by(heir):
                        path.unlink()
                        return True
        return False

    def taken_by(self, heir: socket.socket) -> bool:
        """Whether it is a controller with the run's token; it has the lease then."""
        heir.settimeout(2.0)
        try:
            line = heir.makefile("rb").readline()
            order = json.loads(line)
            if order["token"] != self.token:
                return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        heir.settimeout(None)
        os.dup2(heir.fileno(), 0)
        os.dup2(heir.fileno(), 1)
        self.inbox, self.ended, self.written = b"", False, None
        self.controller = self.open(order["pid"], order["started"])
        self.ended = self.controller == -1
        processes.reap()
        self.launched = {name: child for name, child in self.launched.items() if processes.lives(child.pid)}
        self.worker = self.child(order["command"], order["env"], sys.stderr)
        self.say(up=self.worker.pid, kept={name: child.pid for name, child in self.launched.items()})
        return True

    def finish(self) -> None:
        self.destroy(lambda owner: True)
        if processes.leave(self.folder, self.token, self.host):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.say(bye=True)


def main(argv: list[str]) -> None:
    folder, token, host, controller, started, grace_s, *command = argv
    Keeper(Path(folder), token, host, int(controller), int(started), float(grace_s), command).run()


if __name__ == "__main__":
    main(sys.argv[1:])
