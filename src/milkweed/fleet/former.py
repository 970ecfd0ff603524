"""What a former life of a run has left on this machine: to be adopted by the next, or to be ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from milkweed.fleet import processes

NOTE = "fleet.json"


class Former(NamedTuple):
    token: str
    folder: Path
    grace_s: float
    """How long its hosts wait for an heir."""

    @property
    def keepers(self) -> list[dict[str, int]]:
        """Those that live."""
        found = []
        for file in self.folder.glob("keeper-*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(file.read_text()))
        return [k for k in found if processes.alive(k["pid"], k["started"])]


def remember(logs: Path, token: str, folder: Path, grace_s: float) -> None:
    """So that a later life finds this one."""
    processes.note(logs / NOTE, {"token": token, "folder": str(folder), "grace_s": grace_s})


def forget(logs: Path) -> None:
    (logs / NOTE).unlink(missing_ok=True)


def former(logs: Path) -> Former | None:
    """The life before of the run with these logs, where something of it is left."""
    try:
        found: dict[str, Any] = json.loads((logs / NOTE).read_text())
        life = Former(found["token"], Path(found["folder"]), found["grace_s"])
        owner = json.loads((life.folder / "owner.json").read_text()) if life.folder.is_dir() else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    if owner is not None and processes.alive(owner["pid"], owner["started"]):
        return None  # it lives: that is somebody else's
    return life if life.folder.is_dir() or processes.by_token(life.token) else None


def end_hosts(folder: Path, but: set[str]) -> None:
    """End the hosts that this life has no use for."""
    for file in folder.glob("keeper-*.json"):
        if file.stem.removeprefix("keeper-") not in but:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                keeper = json.loads(file.read_text())
                if processes.alive(keeper["pid"], keeper["started"]):
                    os.kill(keeper["pid"], signal.SIGKILL)  # a keeper's own children go with it
                    token, host = folder.name.removeprefix(processes.FOLDER_PREFIX), file.stem.removeprefix("keeper-")
                    processes.sweep_processes(folder, token, host)
                    processes.leave(folder, token, host)


def end(life: Former, within_s: float = 8.0) -> int:
    """End what is left of it; how many processes that were. Blocks."""
    keepers = life.keepers
    count = len(set(processes.by_token(life.token)) | {k["pid"] for k in keepers})
    for again in (0.0, 0.2):  # one that has not noticed yet that its controller is gone takes the first for a notice
        time.sleep(again)
        for keeper in keepers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper["pid"], signal.SIGTERM)
    until = time.monotonic() + within_s
    while any(processes.alive(k["pid"], k["started"]) for k in keepers) and time.monotonic() < until:
        time.sleep(0.05)
    processes.sweep_processes(life.folder, life.token)
    processes.remove_shm(life.token)
    shutil.rmtree(life.folder, ignore_errors=True)
    return count
