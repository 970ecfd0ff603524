"""A trainer rank's side of the plan: its shards copied and cast into the readers' layout, in its arena or in a slot."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from milkweed.errors import TransferError
from milkweed.transfer.copying import Job, copy
from milkweed.transfer.layout import CHUNK_BYTES, ITEM_BYTES, aligned
from milkweed.transfer.manifest import Grant, Region, Target
from milkweed.transfer.plan import Box, EngineLayout, Move, moves
from milkweed.transfer.slots import HEADER


class Packing:
    """How the shards of one rank, always cut alike, come into one layout. Made once, used for every version.

    `regions` and `chunks` describe the packed form: first what is in one run at the target, in its order, so that one
    READ may carry many tensors; then what is not.
    """

    def __init__(self, layout: EngineLayout, boxes: Sequence[Box], dtype: str = "") -> None:
        sent = layout.as_dtype(dtype) if dtype else layout
        self.boxes = [(name, tuple(offsets), tuple(sizes)) for name, offsets, sizes in boxes]
        self.moves = moves(sent, boxes)
        payload = sum(
            np.prod(piece.sizes, dtype=np.int64).item() * ITEM_BYTES[r.parameters[piece.parameter].dtype]
            for r in sent.ranks for piece in r.pieces
        )  # fmt: skip
        self.target = Target(layout.digest(), dtype, sent.nbytes, payload)
        self.payload = sum(m.nbytes for m in self.moves)
        ends = {start + p.offset + p.nbytes for r, start in zip(sent.ranks, sent.starts, strict=False) for p in r.parameters}
        self.offsets: list[int] = []
        self.regions: list[Region] = []
        self.gaps: list[tuple[int, int]] = []
        self._place(ends)
        self.chunks = self._cut()

    def _place(self, ends: set[int]) -> None:
        """Give every move its place in the packed form."""
        self.moves.sort(key=lambda m: (not m.run, m.to))
        at, runs = 0, 0
        for move in self.moves:
            if not move.run:
                at = aligned(at)
                self.offsets.append(at)
                _, row_bytes, step = move.rows
                self.regions.append(Region(move.to, at, move.nbytes, row_bytes, step))
                at += move.nbytes
                continue
            last = self.regions[-1] if self.regions else None
            end = last.to + last.nbytes if last is not None else -1
            # parameters begin at multiples of 64: what lies between two of them is nobody's and may travel along
            if last is not None and (end == move.to or (end in ends and aligned(end) == move.to)):
                gap = move.to - end
                if gap:
                    self.gaps.append((at, gap))
                at += gap
                self.regions[-1] = Region(last.to, last.offset, last.nbytes + gap + move.nbytes)
            else:
                at = aligned(at)
                self.regions.append(Region(move.to, at, move.nbytes))
            self.offsets.append(at)
            at += move.nbytes
            runs += 1
        self.nbytes = aligned(at)

    def _cut(self) -> list[tuple[int, int]]:
        """`(offset, nbytes)` of the chunks, which tile the regions; rows are whole."""
        bounds = []
        for region in self.regions:
            size = max(1, CHUNK_BYTES // region.row_bytes) * region.row_bytes if region.row_bytes else CHUNK_BYTES
            stop = region.offset + region.nbytes
            bounds += [(start, min(size, stop - start)) for start in range(region.offset, stop, size)]
        return bounds

    def pack(self, tensors: Sequence[torch.Tensor], out: np.ndarray) -> None:
        """Copy into the packed form, `out` (uint8 `[nbytes]`)."""
        views = _Views(out)
        for at, nbytes in self.gaps:
            out[at : at + nbytes] = 0
        copy([_job(tensors[m.shard], m, views, at, packed=True) for m, at in zip(self.moves, self.offsets, strict=True)])

    def place(self, tensors: Sequence[torch.Tensor], slot: np.ndarray) -> None:
        """Copy straight to where the engines' parameters lie, in `slot` (uint8 `[layout.nbytes]`)."""
        views = _Views(slot)
        copy([_job(tensors[m.shard], m, views, m.to, packed=False) for m in self.moves])


class _Views:
    """One memory as tensors of every dtype."""

    def __init__(self, memory: np.ndarray) -> None:
        self.bytes, self.address = torch.from_numpy(memory), memory.ctypes.data
        self._of: dict[str, torch.Tensor] = {}

    def of(self, dtype: str) -> torch.Tensor:
        if dtype not in self._of:
            whole = self.bytes[: self.bytes.numel() // 8 * 8]
            self._of[dtype] = whole.view(getattr(torch, dtype))
        return self._of[dtype]


def _job(shard: torch.Tensor, move: Move, views: _Views, at: int, *, packed: bool) -> Job:
    dtype = getattr(torch, move.dtype)
    source = shard.as_strided(move.sizes, move.source_strides, shard.storage_offset() + move.source)
    if (packed or move.run) and shard.dtype == dtype and shard.device.type == "cpu" and source.is_contiguous():
        return views.address + at, source.data_ptr(), move.nbytes
    out = views.of(move.dtype)
    strides = _contiguous(move.sizes) if packed else move.strides
    target = out.as_strided(move.sizes, strides, at // ITEM_BYTES[move.dtype])
    return lambda: target.copy_(source)


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return tuple(strides[::-1])


class GrantedSlots:
    """The shared-memory slots that this process has been allowed to fill, each mapped once."""

    def __init__(self) -> None:
        self._files: dict[str, np.ndarray] = {}

    def open(self, grant: Grant) -> np.ndarray:
        """The slot's memory, uint8. Raises TransferError if its file is not on this host or the grant has ended."""
        whole = self._files.get(grant.path)
        if whole is None:
            try:
                descriptor = os.open(grant.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise TransferError(f"{grant.path} cannot be opened: {error.strerror}; is it another host's?") from error
            try:
                memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(descriptor)
            self._files = {p: m for p, m in self._files.items() if os.path.exists(p)}
            whole = self._files[grant.path] = np.frombuffer(memory, np.uint8)
        stamp = int(whole[grant.offset - HEADER : grant.offset].view(np.uint64)[0])
        if stamp != grant.stamp:
            raise TransferError(f"the slot at {grant.offset} of {grant.path} was given to somebody else since")
        return whole[grant.offset : grant.offset + grant.nbytes]
