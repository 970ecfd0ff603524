"""The puller's two shared-memory slots: where versions are assembled, who holds them, and when a slot is free again.

    free -> claimed (being filled) -> staged (a whole version) -> held by engines -> staged -> free for the next version
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from milkweed.errors import TransferError
from milkweed.transfer.layout import aligned
from milkweed.transfer.manifest import Staged
from milkweed.types import PolicyVersion

SHM = Path("/dev/shm")
SLOTS = 2
HEADER = 4096
"""Before each slot: its stamp (8 bytes), a number that is new whenever the slot is given to be filled. Who finds it
unchanged after copying has copied bytes that nobody was told to overwrite."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Slot:
    """One slot of a file. `bytes` is its memory, uint8; `stamp` its header's number, uint64 `[1]`."""

    file: _File
    offset: int
    bytes: np.ndarray
    stamp: np.ndarray
    claimed: bool = False
    order: int = 0  # of staging; 0 when nothing is staged
    staged: Staged | None = None
    source: bytes = b""  # identifies the manifest that `staged` came from
    holders: set[str] = field(default_factory=set)
    layout: str = ""  # of the engine that it was filled for last
    contents: dict[tuple, int] = field(default_factory=dict)  # digest of each part read into it, by where it lies

    def new_stamp(self) -> int:
        """Whoever copies from the slot under its old stamp will notice."""
        self.stamp[0] = uuid.uuid4().int >> 65 | 1
        return int(self.stamp[0])


class _File:
    """A shared-memory file of two slots, its pages reserved at once: a full /dev/shm is an error here, not a SIGBUS
    later. `address`, `nbytes` and `kind` are what NIXL asks of memory that it reads into."""

    kind = "DRAM"

    def __init__(self, prefix: str, slot_bytes: int) -> None:
        self.slot_bytes = aligned(max(slot_bytes, 1), mmap.PAGESIZE)
        self.path = SHM / f"{prefix}-{uuid.uuid4().hex[:8]}"
        total = SLOTS * (HEADER + self.slot_bytes)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            # plain mmap: multiprocessing's SharedMemory hands the file to a resource tracker that unlinks it too early
            memory = mmap.mmap(descriptor, total)
        except OSError as error:
            self.path.unlink()
            raise TransferError(
                f"{SHM} has no room for {total} bytes ({shutil.disk_usage(SHM).free} free): {error}. Two slots of the "
                "whole model must fit; enlarge it (docker: --shm-size) or send a smaller dtype"
            ) from error
        finally:
            os.close(descriptor)
        whole = np.frombuffer(memory, np.uint8)
        self.address, self.nbytes = whole.ctypes.data, total
        starts = [HEADER + i * (HEADER + self.slot_bytes) for i in range(SLOTS)]
        self.slots = [
            Slot(self, at, whole[at : at + self.slot_bytes], whole[at - HEADER : at].view(np.uint64)[:1]) for at in starts
        ]

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)  # engines that have it mapped keep their mapping


class Slots:
    """All slots of one puller. Thread-safe. File names begin with `prefix`; files that an earlier, killed puller left
    under the same prefix are removed."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.RLock()
        self._current: _File | None = None
        self._retired: list[_File] = []
        self._count = 0
        for stale in SHM.glob(f"{prefix}-????????"):
            stale.unlink(missing_ok=True)

    def claim(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes` that nobody holds: an empty one first, then the oldest. What is staged in it
        stays there until `begin`. Raises TransferError naming the holders if both are held."""
        with self._lock:
            if self._current is None or self._current.slot_bytes < nbytes:
                self.retire()
                self._current = _File(self._prefix, nbytes)
            free = [s for s in self._current.slots if not s.holders and not s.claimed]
            if not free:
                staged = [s for s in self._current.slots if s.staged]
                held = "; ".join(f"{s.staged.version} by {', '.join(sorted(s.holders))}" for s in staged)
                raise TransferError(
                    f"both slots of {self._current.path} are held ({held or 'being filled'}): release the version that "
                    "no engine serves, and every engine that is dead, before the next pull"
                )
            slot = min(free, key=lambda s: s.order)
            slot.claimed = True
            return slot

    def begin(self, slot: Slot, layout: str = "") -> None:
        """What is staged in a claimed slot is gone from here on: its bytes are about to change."""
        with self._lock:
            slot.staged, slot.order, slot.source = None, 0, b""
            slot.contents = {}
            slot.new_stamp()
            if layout != slot.layout:
                slot.layout = layout
                if layout:
                    slot.bytes[:] = 0  # what is nobody's, the padding of a vocabulary say, is zero

    def stage(self, slot: Slot, staged: Staged, source: bytes) -> None:
        """A claimed slot now holds a whole version."""
        with self._lock:
            self._count += 1
            slot.staged, slot.order, slot.source, slot.claimed = staged, self._count, source, False
            self._sweep()

    def unclaim(self, slot: Slot) -> None:
        with self._lock:
            slot.claimed = False

    def spoil(self, slot: Slot) -> None:
        """Something that was given up may still write into the slot: its file is never filled again."""
        with self._lock:
            if self._current is slot.file:
                self.retire()
            slot.claimed = False

    def newest(self, but: Slot) -> Slot | None:
        """The version staged last, other than in `but`."""
        with self._lock:
            staged = [s for s in self._all() if s.staged is not None and s is not but and not s.claimed]
            return max(staged, key=lambda s: s.order, default=None)

    def find(self, version: PolicyVersion) -> Slot | None:
        """The slot in which `version` is staged, None if it is not (or no longer) there."""
        with self._lock:
            there = [s for s in self._all() if s.staged is not None and s.staged.version == version]
            return max(there, key=lambda s: s.order, default=None)

    def hold(self, holder: str, version: PolicyVersion) -> Staged:
        """Keep `version` from being overwritten until released. Raises TransferError if it is not staged here."""
        with self._lock:
            slot = self.find(version)
            if slot is None or slot.claimed or slot.staged is None:
                there = ", ".join(str(s.staged.version) for s in self._all() if s.staged) or "none"
                raise TransferError(f"{holder} cannot hold version {version}: it is not staged here (staged: {there})")
            slot.holders.add(holder)
            return slot.staged

    def release(self, holder: str, version: PolicyVersion | None = None) -> None:
        """End a hold; with None all of the holder's (it is dead). Releasing twice is no fault."""
        with self._lock:
            for slot in self._all():
                if version is None or (slot.staged is not None and slot.staged.version == version):
                    slot.holders.discard(holder)
            self._sweep()

    def keep_only(self, served: dict[str, PolicyVersion]) -> None:
        """End every hold but that of each holder on the version `served` names for it.

        Should both slots still be held, the holds on the older version end too: an engine that missed an update must
        not keep all others from the next. It then has nothing to roll back to, which its digest will tell it."""
        with self._lock:
            for slot in self._all():
                version = slot.staged.version if slot.staged is not None else None
                slot.holders = {h for h in slot.holders if version is not None and served.get(h) == version}
            current = self._current.slots if self._current else []
            if current and all(s.holders for s in current):
                oldest = min(current, key=lambda s: s.order)
                _log.warning("%s still hold the older version; their holds end", ", ".join(sorted(oldest.holders)))
                oldest.holders = set()
            self._sweep()

    def retire(self) -> None:
        """Start a new file at the next claim: this one is too small. It is unlinked when nobody holds a slot of it and
        a newer version is staged."""
        with self._lock:
            if self._current is not None:
                self._retired.append(self._current)
                self._current = None

    def close(self) -> None:
        """Remove the files. Engines keep what they have mapped."""
        with self._lock:
            self.retire()
            for file in self._retired:
                file.unlink()
            self._retired = []

    def status(self) -> list[dict[str, object]]:
        """One line for each slot: path, version, holders."""
        with self._lock:
            return [
                {
                    "path": str(s.file.path),
                    "version": str(s.staged.version) if s.staged else None,
                    "holders": sorted(s.holders),
                }
                for s in self._all()
            ]

    def _all(self) -> list[Slot]:
        files = [*self._retired, *([self._current] if self._current else [])]
        return [slot for file in files for slot in file.slots]

    def _sweep(self) -> None:
        newest = max((s.order for s in self._all()), default=0)
        for file in list(self._retired):
            if not any(s.holders or (s.order and s.order == newest) for s in file.slots):
                file.unlink()
                self._retired.remove(file)
                _log.debug("removed outgrown %s", file.path)
