"""The keeper of one host: a small process that owns every process of a fleet there and lets none outlive it.

Run by path as `keeper.py FOLDER TOKEN HOST CONTROLLER_PID CONTROLLER_STARTED COMMAND...`; standard library only.

It is a subreaper: what loses its parent becomes its child. It holds a lease, the pipe on its standard input, and
watches the controller's process as well (a fork of the controller may hold the pipe open). When either ends, or it is
told to stop, it kills all descendants, removes what they left in /dev/shm and the folder, and exits.

Lines of JSON come in: `{"watch": name, "pids": []}`, `{"kill": name}`, `{"stop": true}`; and go out: `{"up": pid}`,
`{"exit": name, "pid": n, "how": words}`, `{"stopped": name, "pid": n}` (for STOPPED_S already), `{"killed": name, "count": n}`, `{"host_exit": how}`, `{"bye": true}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
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
    def __init__(self, folder: Path, token: str, host: str, controller: int, started: int, command: list[str]) -> None:
        self.folder, self.token, self.host = folder, token, host
        self.family = processes.Family(os.getpid(), token)
        self.watched: dict[int, tuple[str, int]] = {}  # pidfd -> (replica, pid)
        self.condemned: set[str] = set()  # replicas told to die: their late-comers die too
        self.written: object = None
        self.stopped: dict[int, float] = {}  # process -> since when it has been stopped; inf once that is said
        self.inbox = b""
        self.poll = select.poll()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        processes.note(folder / f"keeper-{host}.json", processes.me())
        self.poll.register(0, select.POLLIN | select.POLLHUP)
        self.controller = self.open(controller, started)
        # a child that outlived the keeper would be nobody's: the kernel kills the worker, which kills its own
        self.worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        self.say(up=self.worker.pid)

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
        """Serve until the lease ends or `stop` comes, then leave nothing behind."""
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.ended = self.controller == -1
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ended", True))
        for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        self.poll.register(wake, select.POLLIN)
        looked = 0.0
        while not self.ended:
            ready = self.poll.poll(int(LOOK_EVERY_S * 1000))
            # first the worker: where it died, its replicas died of that, and not each for a cause of its own
            self.collect()
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
        self.finish()

    def listen(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self.ended = True
            return
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "stop" in order:
                self.ended = True
            elif "watch" in order:
                self.watch(order["watch"], order["pids"])
            elif "kill" in order:
                self.condemned.add(order["kill"])
                self.say(killed=order["kill"], count=self.destroy(order["kill"]))

    def watch(self, name: str, pids: list[int]) -> None:
        self.look()
        for pid in pids:
            p = processes.read(pid)
            fd = -1 if p is None else self.open(pid, p.started)
            if fd == -1:
                self.say(exit=name, pid=pid, how="")
            else:
                self.watched[fd] = (name, pid)

    def gone(self, fd: int) -> None:
        name, pid = self.watched.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)
        self.say(exit=name, pid=pid, how=processes.ending(pid))

    def look(self) -> None:
        members = self.family.look()
        known = sorted((pid, m[0]) for pid, m in members.items())
        processes.kill(pid for pid, (_, owner) in members.items() if owner in self.condemned)
        now = time.monotonic()
        self.stopped = {pid: self.stopped.get(pid, now) for pid in self.family.stopped}
        for pid, since in self.stopped.items():
            if now - since > STOPPED_S and members[pid][1]:
                self.stopped[pid] = float("inf")
                self.say(stopped=members[pid][1], pid=pid)
        if known != self.written:
            processes.note(self.folder / f"known-{self.host}.json", known)
            self.written = known

    def collect(self) -> None:
        """Reap the dead. The worker's end is the host's end; orphans of replicas come here too."""
        how = processes.ending(self.worker.pid)
        if self.worker.pid in processes.reap():
            self.say(host_exit=how)
            self.ended = True

    def destroy(self, owner: str | None) -> int:
        """Kill all that belongs to one replica, or everything (None), and what is forked meanwhile."""
        killed: set[int] = set()
        names: set[str] = set()
        end = time.monotonic() + KILL_WITHIN_S
        while True:
            pids = list(self.family.look()) if owner is None else self.family.of(owner)
            if not pids or time.monotonic() > end:
                break
            names |= processes.library_shm(pids)
            processes.kill(pids)
            killed.update(pids)
            time.sleep(0.02)
            processes.reap() if owner is None else self.collect()
        processes.remove_named(names)
        return len(killed)

    def finish(self) -> None:
        self.destroy(None)
        if processes.leave(self.folder, self.token, self.host):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.say(bye=True)


def main(argv: list[str]) -> None:
    folder, token, host, controller, started, *command = argv
    Keeper(Path(folder), token, host, int(controller), int(started), command).run()


if __name__ == "__main__":
    main(sys.argv[1:])
