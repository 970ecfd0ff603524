"""A packed version that arrives as messages, chunk by chunk: the last resort, where nothing can be read one-sided."""

from __future__ import annotations

import time

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.arrival import Arrival, Part
from milkweed.transfer.manifest import Manifest, Staged
from milkweed.transfer.slots import Slot, Slots


class Inbox:
    """Fills a slot with what `receive` is given. Raises TransferError for chunks that do not fit their digest."""

    def __init__(self, slots: Slots, manifest: Manifest) -> None:
        manifest.check()
        target = manifest.ranks[0].target
        if target is None:
            raise TransferError(f"version {manifest.version} is not packed for engines, so it cannot come by message")
        self._slots, self.manifest, self.target = slots, manifest, target
        self._began = time.perf_counter()
        self.slot: Slot = slots.claim(target.nbytes)
        held, other = dict(self.slot.contents), slots.newest(self.slot)
        if other is not None and (other.staged is None or other.staged.layout != target.layout):
            other = None
        self._arrival = Arrival(manifest, self.slot, other, held)
        self._arrival.plan(np.empty(self._arrival.scratch_bytes, np.uint8))
        slots.begin(self.slot, f"{target.layout} {target.dtype}")
        number = {id(rank): i for i, rank in enumerate(manifest.ranks)}
        offsets = [{c.offset: k for k, c in enumerate(r.chunks)} for r in manifest.ranks]
        self._open: dict[tuple[int, int], Part] = {}
        for post in self._arrival.posts:
            rank = number[id(post.rank)]
            self._open.update({(rank, offsets[rank][p.chunk.offset]): p for p in post.parts})

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """`(rank, chunk)` by number, of all that is not here yet."""
        return sorted(self._open)

    def receive(self, rank: int, chunk: int, data: bytes) -> None:
        part = self._open.get((rank, chunk))
        if part is None:
            return  # twice, or not asked for
        if len(data) != part.chunk.nbytes or xxhash.xxh3_64_intdigest(data) != part.chunk.digest:
            peer = self.manifest.ranks[rank].peer
            raise TransferError(f"version {self.manifest.version} from {peer}: chunk {chunk} differs from its digest")
        part.memory[:] = np.frombuffer(data, np.uint8)
        if part.region.row_bytes:
            part.spread(self.slot.bytes)
        del self._open[rank, chunk]

    def complete(self, source: bytes) -> Staged:
        """Raises TransferError if chunks are missing."""
        if self._open:
            raise TransferError(f"version {self.manifest.version}: {len(self._open)} chunks have not arrived")
        self._arrival.copy_unchanged()
        self.slot.contents = self._arrival.contents
        base, ranges = self._arrival.ranges() or (None, None)
        staged = Staged(
            version=self.manifest.version, path=str(self.slot.file.path), offset=self.slot.offset,
            nbytes=self.target.nbytes, digest=0, tensors=[], seconds=time.perf_counter() - self._began,
            layout=self.target.layout, dtype=self.target.dtype, stamp=int(self.slot.stamp[0]), base=base, ranges=ranges,
        )  # fmt: skip
        self._slots.stage(self.slot, staged, source)
        return staged

    def drop(self) -> None:
        """It will not become whole."""
        self._slots.unclaim(self.slot)
