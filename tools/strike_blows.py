"""Blows of tools/strike.py that a signal can not deal: a process that is slowed, bits that are flipped, a full disk, a reward that raises."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SLOW_S = 16.0
"""As long as an engine is slowed: two looks at its pace (5 s apart), and then some."""
FULL_S = 5.0
RAISE_S = 2.0


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 256) -> Iterator[Path | None]:
    """A file system of so many MB for a run, which begins as what is in `folder`/run and takes its place at the end; None
    where this user may not mount one. One that a killed strike left mounted goes on."""
    disk, kept, new = folder / "disk", folder / "run", folder / "run.new"
    disk.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "milkweed-strike", str(disk)]
    if not disk.is_mount():
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, timeout=20).returncode != 0:
            yield None
            return
        if kept.is_dir():
            shutil.copytree(kept, disk / "run")
    try:
        yield disk / "run"
    finally:
        if (disk / "run").is_dir():  # not over what is there: a file that is gone must not come back
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(disk / "run", new)
            shutil.rmtree(kept, ignore_errors=True)
            new.rename(kept)
        subprocess.run(["umount", "-l", str(disk)], capture_output=True, timeout=20)


def fill_disk(run: Path) -> None:
    """For FULL_S seconds there is no room where the run writes."""
    ballast = run.parent / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(FULL_S)
    finally:
        ballast.unlink(missing_ok=True)


def raise_in_reward(run: Path) -> None:
    """For RAISE_S seconds the reward raises for a third of what it is given (tools/struck.py)."""
    (run / "raise").touch()
    try:
        time.sleep(RAISE_S)
    finally:
        (run / "raise").unlink(missing_ok=True)


def slow_down(pids: list[int]) -> None:
    """For SLOW_S seconds the processes stand still nine tenths of the time."""
    end = time.monotonic() + SLOW_S
    try:
        while time.monotonic() < end:
            _signal(pids, signal.SIGSTOP)
            time.sleep(0.27)
            _signal(pids, signal.SIGCONT)
            time.sleep(0.03)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def flip_checkpoint(run: Path, dice: random.Random) -> str:
    """One bit of the newest whole checkpoint; which file, or empty where there are not two (a run with none begins anew)."""
    steps = [p for p in (run / "checkpoints").glob("step-*") if (p / ".metadata").exists() and list(p.glob("sums-*"))]
    if len(steps) < 2:
        return ""
    newest = max(steps, key=lambda p: int(p.name.removeprefix("step-")))
    part = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    with part.open("r+b") as file:
        _flip(file, dice.randrange(part.stat().st_size), dice)
    return f"{newest.name}/{part.name}"


def flip_weights(token: str, pids: list[int], dice: random.Random) -> str:
    """One bit in the weights that an engine holds in its own memory, found by what its host's slot holds of them; where, or
    empty where none was found. It lasts until the next version is written over it."""
    for _ in range(20):
        files = [f for f in Path("/dev/shm").glob(f"mw-{token}-puller*") if f.stat().st_size > 1 << 16]
        for pid in pids if files else ():
            if where := flip_found(files[0].read_bytes(), pid, dice):
                return where
        time.sleep(0.2)
    return ""


def flip_found(weights: bytes, pid: int, dice: random.Random) -> str:
    """One bit of a float32 somewhere in a process's own memory where 64 bytes of `weights` lie; where, or empty."""
    begin = 64 * dice.randrange(len(weights) // 64 - 1)
    pattern = weights[begin : begin + 64]
    if len(set(pattern)) < 16 or (at := _find(pid, pattern)) is None:  # zeros are found everywhere
        return ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        _flip(memory, at + 4 * dice.randrange(16), dice, bits=0x40)  # of its fraction
        return f"process {pid}, {at:#x}"
    return ""


def _find(pid: int, pattern: bytes) -> int | None:
    """Where in memory that is the process's own."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 +(?:\[heap\])?$", maps, re.M):
                start, end = (int(x, 16) for x in line)
                if end - start > 1 << 29:
                    continue
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    at = memory.read(end - start).find(pattern)
                    if at >= 0:
                        return start + at
    except OSError:  # it is gone
        return None
    return None


def _flip(file: object, at: int, dice: random.Random, bits: int = 0) -> None:
    file.seek(at)  # type: ignore[attr-defined]
    byte = file.read(1)[0]  # type: ignore[attr-defined]
    file.seek(at)  # type: ignore[attr-defined]
    file.write(bytes([byte ^ (bits or 1 << dice.randrange(8))]))  # type: ignore[attr-defined]
