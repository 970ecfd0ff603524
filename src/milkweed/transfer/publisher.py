"""The trainer rank's side: publish its own shards of a version in a leased slot, to be read one-sided."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.arena import Arena
from milkweed.transfer.copying import share
from milkweed.transfer.layout import aligned, item_bytes
from milkweed.transfer.manifest import Chunk, RankManifest, Shard
from milkweed.transfer.nixl import Agent
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    import torch

    from milkweed.transfer.packing import Packing

LocalShard = tuple[str, "torch.Tensor", Sequence[int], Sequence[int]]
"""`(Hugging Face name, this rank's local tensor, shape of the whole tensor, offsets of the local one in it)`."""

CHUNK_BYTES = 4 << 20
SLOTS = 2


@dataclass
class _Slot:
    offset: int
    manifest: RankManifest | None = None
    leases: dict[str, float] = field(default_factory=dict)  # reader -> end of its lease on the monotonic clock

    def holders(self) -> list[str]:
        now = time.monotonic()
        self.leases = {reader: end for reader, end in self.leases.items() if end > now}
        return sorted(self.leases)


class _Plane:
    """One agent and the arena of two slots registered with it; replaced whole when a version outgrows it."""

    def __init__(self, name: str, slot_bytes: int) -> None:
        self.slot_bytes = aligned(slot_bytes, 4096)
        self.arena = Arena(SLOTS * self.slot_bytes)
        self.agent = Agent(name, progress=True)
        self.agent.register(self.arena)
        self.metadata = self.agent.metadata
        self.slots = [_Slot(i * self.slot_bytes) for i in range(SLOTS)]


class Publisher:
    """Publishes one rank's shards, version after version, in two slots.

    A slot under a lease is never overwritten. A lease ends when its reader releases it or its time to live passes, so a
    dead reader blocks nobody for longer; a reader that is slower than its lease finds the digests changed and fails.
    Calls block (a cast, a copy and a digest of the rank's bytes) and may come from any thread.

    Args:
        name: the rank's name, such as `trainer0`; part of its agent's.
        rank: its number among the ranks that publish.
        chunk_bytes: the unit of reading and verifying.
    """

    def __init__(self, name: str, rank: int = 0, chunk_bytes: int = CHUNK_BYTES) -> None:
        if chunk_bytes < 4096 or chunk_bytes % 64:
            raise ValueError(f"chunk_bytes must be a multiple of 64 and at least 4096, not {chunk_bytes}")
        self.name, self.rank, self.chunk_bytes = name, rank, chunk_bytes
        self._plane: _Plane | None = None
        self._outgrown: list[_Plane] = []  # kept to the end: unmapping what a peer knows can crash this process
        self._newest: _Slot | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._digester = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-digest")

    def publish(
        self,
        version: PolicyVersion,
        shards: Iterable[LocalShard],
        readers: Sequence[str],
        ttl_s: float = 60.0,
        dtype: torch.dtype | str | None = None,
    ) -> RankManifest:
        """Copy the shards into a free slot (floating-point ones cast to `dtype`, None: as they are) and lease it to the
        readers for `ttl_s` seconds.

        Raises TransferError if every slot is leased (naming the readers), if a tensor cannot be sent, or after `close`.
        On failure nothing is leased and the newest version published before stays readable.
        """
        entries = [self._entry(shard, dtype) for shard in shards]
        table: list[Shard] = []
        offset = 0
        for name, tensor, sent, shape, offsets in entries:
            nbytes = tensor.numel() * item_bytes(sent, name)
            table.append(Shard(name, sent, shape, offsets, tuple(tensor.shape), offset, nbytes))
            offset += aligned(nbytes)
        if not table:
            raise TransferError(f"{self.name}: no shards to publish for version {version}")
        with self._lock:
            plane, slot = self._free_slot(offset, version)
            if self._newest is slot:
                self._newest = None
            slot.manifest = None
            chunks = self._fill(plane, slot, [(e[1], s) for e, s in zip(entries, table, strict=True)], offset)
            slot.manifest = RankManifest(
                version=version, rank=self.rank, agent=plane.agent.name, metadata=plane.metadata,
                address=plane.arena.address + slot.offset, slot=plane.slots.index(slot), nbytes=offset,
                chunks=chunks, shards=table,
            ).sealed()  # fmt: skip
            slot.leases = dict.fromkeys(readers, time.monotonic() + ttl_s)
            self._newest = slot
            return slot.manifest

    def publish_packed(
        self,
        version: PolicyVersion,
        packing: Packing,
        tensors: Sequence[torch.Tensor],
        readers: Sequence[str],
        ttl_s: float = 60.0,
    ) -> RankManifest:
        """As `publish`, in the readers' own layout. `tensors` are those that the packing was made for, in its order."""
        with self._lock:
            plane, slot = self._free_slot(packing.nbytes, version)
            if self._newest is slot:
                self._newest = None
            slot.manifest = None
            target = plane.arena.bytes[slot.offset : slot.offset + packing.nbytes]
            packing.pack(tensors, target)
            chunks = digested(target, packing.chunks)
            slot.manifest = RankManifest(
                version=version, rank=self.rank, agent=plane.agent.name, metadata=plane.metadata,
                address=plane.arena.address + slot.offset, slot=plane.slots.index(slot), nbytes=packing.nbytes,
                chunks=chunks, shards=[], target=packing.target, regions=packing.regions, payload=packing.payload,
            ).sealed()  # fmt: skip
            slot.leases = dict.fromkeys(readers, time.monotonic() + ttl_s)
            self._newest = slot
            return slot.manifest

    def chunk(self, version: PolicyVersion, number: int) -> bytes:
        """The bytes of one chunk of a published version, for a reader that cannot read them itself. Raises
        TransferError if the version's slot was filled again."""
        with self._lock:
            for slot in self._plane.slots if self._plane else []:
                if slot.manifest is not None and slot.manifest.version == version:
                    chunk, at = slot.manifest.chunks[number], slot.offset
                    assert self._plane is not None
                    return self._plane.arena.bytes[at + chunk.offset : at + chunk.offset + chunk.nbytes].tobytes()
        raise TransferError(f"{self.name} no longer has version {version}")

    def lease(self, reader: str, ttl_s: float = 60.0) -> RankManifest:
        """Lease the newest version to one more reader (an engine that joins late). Raises TransferError if there is
        none."""
        with self._lock:
            if self._newest is None or self._newest.manifest is None or self._closed:
                raise TransferError(f"{self.name} has published no version that {reader} could read")
            self._newest.leases[reader] = time.monotonic() + ttl_s
            return self._newest.manifest

    def release(self, reader: str, version: PolicyVersion | None = None) -> None:
        """End the reader's lease on `version`, or all its leases (None: it is dead). Releasing twice is no fault."""
        with self._lock:
            for slot in self._plane.slots if self._plane else []:
                if version is None or (slot.manifest is not None and slot.manifest.version == version):
                    slot.leases.pop(reader, None)

    def leases(self) -> dict[PolicyVersion, list[str]]:
        """The readers that hold each version, those whose lease has ended left out."""
        with self._lock:
            slots = self._plane.slots if self._plane else []
            return {s.manifest.version: s.holders() for s in slots if s.manifest is not None}

    def close(self) -> None:
        """Stop serving. A reader in the middle of a READ gets an error or bytes that fail their digest."""
        with self._lock:
            self._closed = True
            for plane in [*self._outgrown, *([self._plane] if self._plane else [])]:
                plane.agent.close()
            self._outgrown, self._plane, self._newest = [], None, None
            self._digester.shutdown()

    def _entry(self, shard: LocalShard, dtype: torch.dtype | str | None) -> tuple[str, torch.Tensor, str, tuple, tuple]:
        name, tensor, shape, offsets = shard
        sent = _dtype_name(tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype)
        return name, tensor.detach(), sent, tuple(int(n) for n in shape), tuple(int(o) for o in offsets)

    def _free_slot(self, nbytes: int, version: PolicyVersion) -> tuple[_Plane, _Slot]:
        if self._closed:
            raise TransferError(f"{self.name} is closed and cannot publish version {version}")
        if self._plane is None or self._plane.slot_bytes < nbytes:
            plane = _Plane(self.name, nbytes)
            if self._plane is not None:
                self._outgrown.append(self._plane)
            self._plane = plane
        free = [slot for slot in self._plane.slots if not slot.holders()]
        if not free:
            held = "; ".join(
                f"version {s.manifest.version} by {', '.join(s.holders())}" for s in self._plane.slots if s.manifest
            )
            raise TransferError(
                f"{self.name} cannot publish version {version}: both slots are leased ({held}). "
                "Release a reader that is dead, or wait for its lease to end"
            )
        # the newest version goes last: an engine that joins late may still want it
        return self._plane, min(free, key=lambda slot: slot is self._newest)

    def _fill(self, plane: _Plane, slot: _Slot, pieces: list[tuple[Any, Shard]], nbytes: int) -> list[Chunk]:
        """Copy the pieces into the slot, digesting each chunk in a second thread as soon as it is full."""
        import torch

        target = plane.arena.bytes[slot.offset : slot.offset + nbytes]
        memory = torch.from_numpy(target)
        bounds = [(start, min(self.chunk_bytes, nbytes - start)) for start in range(0, nbytes, self.chunk_bytes)]
        digests, filled = [], 0
        for tensor, shard in pieces:
            end = shard.arena_offset + shard.nbytes
            if shard.nbytes:
                view = memory[shard.arena_offset : end].view(getattr(torch, shard.dtype)).view(shard.local_shape)
                view.copy_(tensor)
            filled = shard.arena_offset + aligned(shard.nbytes)
            target[end:filled] = 0
            while len(digests) < len(bounds) and sum(bounds[len(digests)]) <= filled:
                digests.append(self._digester.submit(_digest, target, *bounds[len(digests)]))
        return [Chunk(start, size, digest.result()) for (start, size), digest in zip(bounds, digests, strict=True)]


def digested(memory: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[Chunk]:
    """The chunks at `(offset, nbytes)` of `memory`, with their digests."""
    found: list[Chunk | None] = [None] * len(bounds)

    def one(i: int) -> None:
        start, nbytes = bounds[i]
        found[i] = Chunk(start, nbytes, _digest(memory, start, nbytes))

    share([functools.partial(one, i) for i in range(len(bounds))])
    return [chunk for chunk in found if chunk is not None]


def _digest(memory: np.ndarray, start: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(memory[start : start + nbytes])


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
