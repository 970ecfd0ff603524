"""A host that has a version hands it on: its staged slot, readable by the pullers of other hosts."""

from __future__ import annotations

import threading

from milkweed.transfer.layout import CHUNK_BYTES
from milkweed.transfer.manifest import RankManifest, Region, Staged, Target
from milkweed.transfer.nixl import Agent
from milkweed.transfer.publisher import digested
from milkweed.transfer.slots import Slot


class Relay:
    """The agent that others read this host's slots through, and the manifests of what they may read. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._agent = Agent(f"{name}-relay", progress=True)
        self._files: dict[int, tuple[object, bytes]] = {}
        self._made: tuple[int, RankManifest] | None = None
        self._lock = threading.Lock()

    def offer(self, slot: Slot, staged: Staged) -> RankManifest:
        """The whole slot as one share; digested once for all readers."""
        with self._lock:
            if self._made is not None and self._made[0] == staged.stamp:
                return self._made[1]
            key = id(slot.file)
            if key not in self._files:
                self._agent.register(slot.file)
                # kept, and with it the memory: unmapping what a peer knows can crash this process
                self._files[key] = (slot.file, self._agent.metadata)
            bounds = [(at, min(CHUNK_BYTES, staged.nbytes - at)) for at in range(0, staged.nbytes, CHUNK_BYTES)]
            chunks = digested(slot.bytes, bounds)
            share = RankManifest(
                version=staged.version, rank=0, agent=self._agent.name, metadata=self._files[key][1],
                address=slot.bytes.ctypes.data, slot=0, nbytes=staged.nbytes, chunks=chunks, shards=[],
                target=Target(staged.layout, staged.dtype, staged.nbytes, staged.nbytes),
                regions=[Region(0, 0, staged.nbytes)], payload=staged.nbytes,
            ).sealed()  # fmt: skip
            self._made = (staged.stamp, share)
            return share

    def close(self) -> None:
        self._agent.close()
