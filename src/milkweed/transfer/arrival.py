"""What a puller has to read of a packed version, and where each part lands: straight in the slot wherever it can."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milkweed.transfer.layout import aligned
from milkweed.transfer.manifest import Chunk, Manifest, RankManifest, Region
from milkweed.transfer.slots import Slot
from milkweed.types import PolicyVersion

READ_BYTES = 4 << 20
"""Chunks that follow on each other, here and there, are read together up to this many bytes."""


@dataclass
class Part:
    """One chunk and where it lands: `memory` of the slot, or scratch whose rows are then spread over the slot."""

    chunk: Chunk
    region: Region
    memory: np.ndarray

    @property
    def key(self) -> tuple:
        """Which place of the layout it fills."""
        r = self.region
        return (r.to, r.row_bytes, r.step, self.chunk.offset - r.offset, self.chunk.nbytes)

    def spread(self, slot: np.ndarray) -> None:
        """Put rows that landed in scratch in their places."""
        self.rows(slot)[:] = self.memory.reshape(-1, self.region.row_bytes)

    def rows(self, slot: np.ndarray) -> np.ndarray:
        r = self.region
        start = r.to + (self.chunk.offset - r.offset) // r.row_bytes * r.step
        shape = (self.chunk.nbytes // r.row_bytes, r.row_bytes)
        return np.lib.stride_tricks.as_strided(slot[start:], shape, (r.step, 1))


@dataclass
class Post:
    """One READ: parts that follow on each other in the rank's slot and here."""

    rank: RankManifest
    parts: list[Part]

    @property
    def piece(self) -> tuple[int, int]:
        first, last = self.parts[0].chunk, self.parts[-1].chunk
        return first.offset, last.offset + last.nbytes - first.offset

    @property
    def place(self) -> int:
        return self.parts[0].memory.ctypes.data


class Arrival:
    """What one version needs to become whole in `slot`, given what the slot and `other` hold already.

    `posts` are to be read; `same` parts lie in the slot from before, `copied` ones in `other`. `moved` counts the bytes
    that are read.
    """

    def __init__(self, manifest: Manifest, slot: Slot, other: Slot | None, held: dict[tuple, int]) -> None:
        self.manifest, self.slot, self.other, self.held = manifest, slot, other, held
        self.scratch_bytes = sum(
            aligned(c.nbytes) for r in manifest.ranks for _, c in _chunks(r) if _.row_bytes
        )  # fmt: skip

    def plan(self, scratch: np.ndarray) -> None:
        self.posts: list[Post] = []
        self.contents: dict[tuple, int] = {}
        self.same: list[Part] = []
        self.copied: list[Part] = []
        self.changed: list[tuple[int, int]] = []
        before = self.other.contents if self.other is not None else {}
        at = 0
        for rank in self.manifest.ranks:
            for region, chunk in _chunks(rank):
                if region.row_bytes:
                    memory = scratch[at : at + chunk.nbytes]
                    at += aligned(chunk.nbytes)
                else:
                    start = region.to + chunk.offset - region.offset
                    memory = self.slot.bytes[start : start + chunk.nbytes]
                part = Part(chunk, region, memory)
                self.contents[part.key] = chunk.digest
                unchanged = before.get(part.key) == chunk.digest
                if not unchanged:
                    self._note_change(part)
                if self.held.get(part.key) == chunk.digest:
                    self.same.append(part)
                elif unchanged:
                    self.copied.append(part)
                else:
                    self._post(rank, part)
        self.moved = sum(p.piece[1] for p in self.posts)

    def _post(self, rank: RankManifest, part: Part) -> None:
        last = self.posts[-1] if self.posts else None
        if last is not None and last.rank is rank:
            end = last.parts[-1]
            follows = end.chunk.offset + end.chunk.nbytes == part.chunk.offset
            beside = end.memory.ctypes.data + end.chunk.nbytes == part.memory.ctypes.data
            if follows and beside and last.piece[1] + part.chunk.nbytes <= READ_BYTES:
                last.parts.append(part)
                return
        self.posts.append(Post(rank, [part]))

    def _note_change(self, part: Part) -> None:
        r = part.region
        if r.row_bytes:
            first = r.to + (part.chunk.offset - r.offset) // r.row_bytes * r.step
            self.changed.append((first, (part.chunk.nbytes // r.row_bytes - 1) * r.step + r.row_bytes))
        else:
            self.changed.append((r.to + part.chunk.offset - r.offset, part.chunk.nbytes))

    def copy_unchanged(self) -> None:
        """Take from the other slot what this version shares with the one there."""
        if self.other is None:
            return
        for part in self.copied:
            if part.region.row_bytes:
                part.rows(self.slot.bytes)[:] = part.rows(self.other.bytes)
            else:
                start = part.region.to + part.chunk.offset - part.region.offset
                part.memory[:] = self.other.bytes[start : start + part.chunk.nbytes]

    def ranges(self) -> tuple[PolicyVersion, list[tuple[int, int]]] | None:
        """The other slot's version and what differs from it, where that is less than half of everything."""
        if self.other is None or self.other.staged is None or not self.other.contents:
            return None
        merged: list[list[int]] = []
        for start, nbytes in sorted(self.changed):
            if merged and start <= merged[-1][0] + merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + nbytes - merged[-1][0])
            else:
                merged.append([start, nbytes])
        target = self.manifest.ranks[0].target
        assert target is not None
        if sum(n for _, n in merged) * 2 > target.nbytes:
            return None
        return self.other.staged.version, [(s, n) for s, n in merged]


def _chunks(rank: RankManifest) -> list[tuple[Region, Chunk]]:
    """Every chunk with its region; both are in the order of the rank's slot."""
    found, i = [], 0
    for region in rank.regions:
        end = region.offset + region.nbytes
        while i < len(rank.chunks) and rank.chunks[i].offset < end:
            found.append((region, rank.chunks[i]))
            i += 1
    return found
