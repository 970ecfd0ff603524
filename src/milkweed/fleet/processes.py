"""Find, kill and clean up after processes of a fleet: what the keeper does on its host, and any controller at start.

Standard library only, and no import from the rest of the package: the keeper loads this file by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TOKEN_VAR = "MILKWEED_TOKEN"
HOST_VAR = "MILKWEED_HOST"
REPLICA_VAR = "MILKWEED_REPLICA"
SHM = Path("/dev/shm")
FOLDER_PREFIX = "milkweed-"
# Names that libraries give to shared memory on their own; removed only where a process that we kill maps the file.
LIBRARY_SHM = ("sem.mp-", "psm_", "torch_", "sglang_", "ucx_shm_", "nccl-")


class Process(NamedTuple):
    """One process. `started` (clock ticks since boot) tells it from a later one with the same id."""

    pid: int
    parent: int
    started: int
    state: str
    ticks: int
    """Clock ticks it has computed for."""


def read(pid: int) -> Process | None:
    """What the kernel says of `pid`; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the command name may hold spaces and brackets: count fields from the last bracket
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], int(fields[11]) + int(fields[12]))


def ending(pid: int) -> str:
    """How a process ended, in words, if it can still be read (until its parent has collected it); else empty."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] not in "ZX":
        return ""
    return _words(int(fields[49]))


def _words(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"with status {os.WEXITSTATUS(status)}"
    name = signal.Signals(os.WTERMSIG(status)).name
    return f"by {name}" + (" (out of memory? see the kernel's log)" if name == "SIGKILL" else "")


def base() -> Path:
    """Where runs keep their temporary folders; short, for sockets in it may have names of 108 bytes at most."""
    folder = Path(tempfile.gettempdir())
    return folder if len(str(folder)) <= 60 else Path("/tmp")


def everyone() -> dict[int, Process]:
    """Every process on this machine, zombies left out."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {p.pid: p for p in found if p is not None and p.state not in "ZX"}


def alive(pid: int, started: int) -> bool:
    """True while the process that had this id and start time runs (a zombie does not)."""
    p = read(pid)
    return p is not None and p.started == started and p.state not in "ZX"


def lives(pid: int) -> bool:
    """True while there is such a process (a zombie is none)."""
    p = read(pid)
    return p is not None and p.state not in "ZX"


def environment(pid: int) -> dict[str, str]:
    """The environment `pid` was started with; empty if it is gone, another user's, or overwritten."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def library_shm(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm with a library's own prefix that these processes map."""
    names: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for line in lines:
            _, found, name = line.partition(f"{SHM}/")
            if found and name.startswith(LIBRARY_SHM) and not name.endswith("(deleted)"):
                names.add(name)
    return names


class Family:
    """The descendants of one process, known also after their parents died.

    A child inherits its owner (a replica's name) from its parent at first sight, or names it in its environment.
    Programs may overwrite their environment (those that set their title do), parents may die: together the two
    find what either would miss.
    """

    def __init__(self, root: int, token: str) -> None:
        self.root, self.token = root, token
        self.stopped: dict[int, int] = {}
        """Members that a signal has stopped (not those that a debugger holds) at the last look, and their ticks."""
        self.members: dict[int, tuple[int, str]] = {}
        """pid -> (started, owner)"""

    def look(self) -> dict[int, tuple[int, str]]:
        """Read the process table again; returns the living members."""
        table = everyone()
        members = {pid: m for pid, m in self.members.items() if pid in table and table[pid].started == m[0]}
        # oldest first, so that parents are known before their children
        for p in sorted(table.values(), key=lambda p: (p.started, p.pid)):
            if p.pid in members or p.pid == self.root:
                continue
            if p.parent == self.root or p.parent in members:
                owner = environment(p.pid).get(REPLICA_VAR) or (members[p.parent][1] if p.parent in members else "")
                members[p.pid] = (p.started, owner)
        self.members = members
        self.stopped = {pid: table[pid].ticks for pid in members if pid in table and table[pid].state == "T"}
        return members

    def of(self, owner: str) -> list[int]:
        return [pid for pid, m in self.look().items() if m[1] == owner]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each; one that is gone is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap() -> dict[int, str]:
    """Collect this process's dead children; returns how each ended, in words."""
    dead: dict[int, str] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if pid == 0:
            return dead
        dead[pid] = _words(status)


def remove_shm(token: str) -> None:
    """Remove the run's own entries of /dev/shm: memory `mw-TOKEN-*` and semaphores `sem.mw-TOKEN-*`."""
    if SHM.is_dir():
        remove_named(n for n in os.listdir(SHM) if n.startswith((f"mw-{token}-", f"sem.mw-{token}-")))


def remove_named(names: Iterable[str]) -> None:
    """Remove these entries of /dev/shm; one that is gone is fine."""
    for name in names:
        path = SHM / name
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_unmapped(token: str) -> None:
    """Remove those of the run's entries of /dev/shm that none of its living processes maps."""
    mapped = set()
    for pid in by_token(token):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            mapped |= {line.partition(f"{SHM}/")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    names = os.listdir(SHM) if SHM.is_dir() else []
    remove_named(n for n in names if n.startswith((f"mw-{token}-", f"sem.mw-{token}-")) and n not in mapped)


def by_token(token: str, host: str | None = None) -> list[int]:
    """Processes of this machine whose environment names the run (and the host, if given)."""
    found = []
    for pid in everyone():
        env = environment(pid)
        if env.get(TOKEN_VAR) == token and host in (None, env.get(HOST_VAR)):
            found.append(pid)
    return found


def sweep_processes(folder: Path, token: str, host: str | None = None, within_s: float = 4.0) -> None:
    """Kill whatever a dead keeper can no longer kill: what it had seen, and what names the run and host (None: all)."""
    names: set[str] = set()
    end = time.monotonic() + within_s
    while True:
        pids = {pid for pid, started in _known(folder, host or "*") if alive(pid, started)} | set(by_token(token, host))
        if not pids or time.monotonic() > end:
            break
        names |= library_shm(pids)
        kill(pids)
        time.sleep(0.05)
    remove_named(names)


def leave(folder: Path, token: str, host: str) -> bool:
    """Sign a host off. Hosts of one machine share the folder and the run's names in /dev/shm, so the last one to go
    removes these names; returns whether this was the last."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / f"keeper-{host}.json").unlink(missing_ok=True)
        last = not any(alive(p["pid"], p["started"]) for p in _keepers(folder))
        if last:
            remove_shm(token)
        return last
    finally:
        os.close(lock)


def sweep_dead_runs() -> int:
    """Clean up after every former run on this machine whose controller and keepers are gone. Returns how many runs."""
    swept = 0
    for folder in _folders(base()):
        try:
            owner = json.loads((folder / "owner.json").read_text())
        except FileNotFoundError:
            continue  # being made or removed just now by another controller
        if not any(alive(p["pid"], p["started"]) for p in [owner, *_keepers(folder)]):
            token = folder.name.removeprefix(FOLDER_PREFIX)
            sweep_processes(folder, token)
            remove_shm(token)
            shutil.rmtree(folder, ignore_errors=True)
            swept += 1
    return swept


def note(path: Path, value: object) -> None:
    """Write JSON whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def me() -> dict[str, int]:
    """This process as it is noted in a run's temporary folder."""
    p = read(os.getpid())
    assert p is not None
    return {"pid": p.pid, "started": p.started}


def _folders(where: Path) -> Iterator[Path]:
    for folder in where.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.is_dir() and folder.stat().st_uid == os.getuid():
                yield folder


def _keepers(folder: Path) -> list[dict[str, int]]:
    found = []
    for file in folder.glob("keeper-*.json"):
        with contextlib.suppress(FileNotFoundError):
            found.append(json.loads(file.read_text()))
    return found


def _known(folder: Path, host: str) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for file in folder.glob(f"known-{host}.json"):
        with contextlib.suppress(FileNotFoundError):
            pairs += [(pid, started) for pid, started in json.loads(file.read_text())]
    return pairs
