"""A run's directory: what it holds, who may write in it, and how a run finds its way back.

    run.json        recipe, its arguments, the configuration as it ran, versions
    lock            held (flock) by the one controller that runs it
    checkpoints/    TorchTitan checkpoints, the controller's own state inside
    ledger/         every trajectory, what became of it, its tokens
    logprobs/       the trainer's, of each step's batch
    metrics.jsonl, tensorboard/, samples.jsonl, logs/
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from milkweed.errors import ConfigError, RunLocked
from milkweed.files import write_atomic

INVOCATION: ContextVar[tuple[str, list[str]]] = ContextVar("invocation", default=("notebook", []))
"""The recipe being run and its arguments, which `run.json` keeps so that `milkweed run DIR` can go on."""


class RunRecord(msgspec.Struct, kw_only=True):
    """`run.json`: enough to start the same run again."""

    recipe: str
    arguments: list[str]
    config: dict[str, Any]
    milkweed: str
    python: str
    created: str


def default_directory(recipe: str) -> Path:
    """`runs/<recipe>-<date>-<time>`, a name not taken yet."""
    stem = f"runs/{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = Path(stem), 1
    while path.exists():
        path, n = Path(f"{stem}-{n}"), n + 1
    return path


class RunDirectory:
    """Opens `path` for one controller. Raises RunLocked where another one holds it, ConfigError where the directory
    holds something else than a run, or a run of another configuration."""

    def __init__(self, path: str | Path, *, recipe: str, arguments: list[str], config: dict[str, Any], allow_changes: bool = False):
        self.path = Path(path).absolute()
        record_path = self.path / "run.json"
        if self.path.exists() and not record_path.exists() and any(p.name not in ("lock", "logs") for p in self.path.iterdir()):
            raise ConfigError(f"run_dir {self.path} is not empty and holds no run (no run.json); name another directory")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self.existed = record_path.exists()
            self.changed: list[str] = []
            """What the configuration has that the run did not begin with, where `allow_changes` accepts it."""
            if self.existed:
                self.record = read_record(self.path)
                self.changed = self._changes(config)
                if self.changed and not allow_changes:
                    raise ConfigError(
                        f"{self.path} was begun with another configuration ({'; '.join(self.changed)}); go on with the old one "
                        "(milkweed run DIR), name another run_dir, or accept the change with --allow-changes"
                    )
            else:
                from milkweed import __version__

                self.record = RunRecord(
                    recipe=recipe,
                    arguments=arguments,
                    config=config,
                    milkweed=__version__,
                    python=sys.version.split()[0],
                    created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                )
                write_atomic(record_path, msgspec.json.format(msgspec.json.encode(self.record), indent=1))
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> int:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunLocked(
                f"{self.path} is in use by another controller ({holder or 'unknown'}); stop that one first, or name another run_dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return descriptor

    def _changes(self, config: dict[str, Any]) -> list[str]:
        return [
            f"{key}: {was!r} -> {now!r}"
            for key, was, now in _differences(self.record.config, json.loads(json.dumps(config)))
            if key.split(".")[0] not in MAY_CHANGE
        ]

    def begin_life(self) -> int:
        """A new incarnation: one more than any life of this run has had, whether it came to a checkpoint or not."""
        path = self.path / "incarnation"
        try:
            lives = int(path.read_text()) + 1
        except FileNotFoundError:
            lives = 1 if self.existed else 0
        except ValueError as error:
            raise ConfigError(f"{path} is broken: {error}") from error
        write_atomic(path, f"{lives}\n".encode())
        return lives

    def discard(self) -> None:
        """Take back a directory in which nothing came to run, so that the same name can be used again with what was
        wrong put right. Logs are left; a run that was there before is not touched."""
        if not self.existed and not (self.path / "metrics.jsonl").exists():
            (self.path / "run.json").unlink(missing_ok=True)
            (self.path / "lock").unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Gives up the lock."""
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)  # closing releases the flock
            self._lock = -1


MAY_CHANGE = frozenset({"run_dir", "steps", "mesh", "wandb", "allow_changes", "eval_every", "checkpoint_every", "samples_logged", "keep_tokens_steps", "retries"})
"""Keys that a resumed run may have changed without being asked: they do not alter what was trained so far."""


def refuse_live(path: Path) -> None:
    """Raises RunLocked while a controller runs in `path`."""
    if not (path / "lock").exists():
        return
    with (path / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise RunLocked(f"{path} is being run ({file.read(200).decode(errors='replace').strip() or 'unknown'}); wait until it has ended") from error


def read_record(path: str | Path) -> RunRecord:
    """The record of the run in `path`. Raises ConfigError naming the file where there is none or it is broken."""
    file = Path(path) / "run.json"
    if not file.exists():
        raise ConfigError(f"{path} holds no run (no run.json)")
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is broken: {error}") from error


def _differences(was: Any, now: Any, key: str = ""):
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was.keys() | now.keys()):
            yield from _differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield key, was, now
