"""Which bytes of which shard land where: the pure part of assembling full tensors from the ranks' shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Manifest, Shard, StagedTensor

ALIGN = 64
"""Every tensor and shard starts at a multiple of this many bytes: a cache line, and any dtype's alignment."""

CHUNK_BYTES = 1 << 20
"""Of a packed version: the unit of verifying, and of what an update that changes little sends."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip
"""Torch's dtype names that travel, with their size in bytes."""

_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # numpy has no bfloat16; a copy needs only the width


def aligned(nbytes: int, to: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def item_bytes(dtype: str, name: str) -> int:
    """Bytes of one element. Raises TransferError naming the tensor if the dtype is unknown."""
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise TransferError(f"tensor {name}: dtype {dtype} cannot be transferred; known are {', '.join(ITEM_BYTES)}")
    return size


@dataclass(frozen=True)
class Copy:
    """One shard's way from its rank's bytes into its tensor."""

    rank: int
    """Index into `Manifest.ranks`."""
    shard: Shard
    tensor: StagedTensor


@dataclass(frozen=True)
class Layout:
    """Where every full tensor lies in a staged slot of `nbytes`, and the copies that fill it."""

    nbytes: int
    tensors: list[StagedTensor]
    copies: list[Copy]


def plan(manifest: Manifest) -> Layout:
    """The layout of the full tensors, in the order of their names.

    Raises TransferError naming the tensor and ranks if shards disagree about shape or dtype, reach outside their
    tensor, are of the wrong size, or do not cover it exactly once.
    """
    by_name: dict[str, list[tuple[int, Shard]]] = {}
    for index, rank in enumerate(manifest.ranks):
        for shard in rank.shards:
            by_name.setdefault(shard.name, []).append((index, shard))
    if not by_name:
        raise TransferError(f"the manifest of version {manifest.version} holds no tensors")
    offset, tensors, copies = 0, [], []
    for name in sorted(by_name):
        parts = by_name[name]
        first = parts[0][1]
        for index, shard in parts:
            where = f"tensor {name}, {manifest.ranks[index].peer}"
            if (shard.shape, shard.dtype) != (first.shape, first.dtype):
                raise TransferError(
                    f"{where}: {shard.dtype}{list(shard.shape)}, but {manifest.ranks[parts[0][0]].peer} has "
                    f"{first.dtype}{list(first.shape)}"
                )
            _check_box(shard, where)
        boxes = [(s.offsets, s.local_shape) for _, s in parts]
        check_cover(name, first.shape, boxes, [manifest.ranks[i].rank for i, _ in parts])
        size = math.prod(first.shape) * item_bytes(first.dtype, name)
        tensor = StagedTensor(name, first.dtype, first.shape, offset, size)
        tensors.append(tensor)
        copies += [Copy(index, shard, tensor) for index, shard in parts if shard.nbytes]
        offset += aligned(size)
    return Layout(offset, tensors, copies)


def check_cover(
    name: str,
    shape: Sequence[int],
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]],
    ranks: Sequence[int],
) -> None:
    """Raises TransferError unless the boxes `(offsets, local_shape)` of `ranks` cover every element of a tensor of
    `shape` exactly once. Exact for any dimension: cells between all cuts of the boxes are counted, not elements."""
    if math.prod(shape) == 0:
        return
    solid = [(o, n, r) for (o, n), r in zip(boxes, ranks, strict=True) if math.prod(n) > 0]
    cuts = [
        np.unique([0, size] + [e for o, n, _ in solid for e in (o[d], o[d] + n[d])]) for d, size in enumerate(shape)
    ]
    spans = [
        tuple(slice(*np.searchsorted(cuts[d], (o[d], o[d] + n[d]))) for d in range(len(shape))) for o, n, _ in solid
    ]
    count = np.zeros([len(c) - 1 for c in cuts], np.int32)
    for span in spans:
        count[span] += 1
    if (count == 1).all():
        return
    cell = tuple(int(i) for i in np.argwhere(count != 1)[0])
    place = ", ".join(f"{cuts[d][i]}:{cuts[d][i + 1]}" for d, i in enumerate(cell))
    owners = [
        rank
        for span, (_, _, rank) in zip(spans, solid, strict=True)
        if all(s.start <= i < s.stop for s, i in zip(span, cell, strict=True))
    ]
    found = f"published by ranks {owners}" if owners else f"published by none of the ranks {sorted(set(ranks))}"
    raise TransferError(
        f"tensor {name}: elements [{place}] of {list(shape)} are {found}; each must come from exactly one"
    )


def assemble(layout: Layout, sources: Sequence[np.ndarray], slot: np.ndarray) -> None:
    """Fill `slot` (uint8, at least `layout.nbytes` long) from `sources`, one uint8 array for each rank's slot. The
    bytes between tensors are zeroed, so that equal weights have equal digests."""
    for copy in layout.copies:
        shard, tensor = copy.shard, copy.tensor
        carrier = _CARRIER[ITEM_BYTES[tensor.dtype]]
        full = slot[tensor.offset : tensor.offset + tensor.nbytes].view(carrier).reshape(tensor.shape)
        piece = sources[copy.rank][shard.arena_offset : shard.arena_offset + shard.nbytes].view(carrier)
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.local_shape, strict=True))
        full[box] = piece.reshape(shard.local_shape)
    for tensor in layout.tensors:
        end = tensor.offset + tensor.nbytes
        slot[end : tensor.offset + aligned(tensor.nbytes)] = 0


def _check_box(shard: Shard, where: str) -> None:
    if not len(shard.shape) == len(shard.offsets) == len(shard.local_shape):
        raise TransferError(f"{where}: shape, offsets and local shape differ in their number of dimensions")
    for size, offset, extent in zip(shard.shape, shard.offsets, shard.local_shape, strict=True):
        if offset < 0 or extent < 0 or offset + extent > size:
            raise TransferError(
                f"{where}: shard {list(shard.local_shape)} at {list(shard.offsets)} reaches outside {list(shard.shape)}"
            )
    if shard.nbytes != math.prod(shard.local_shape) * item_bytes(shard.dtype, shard.name):
        raise TransferError(f"{where}: {shard.nbytes} bytes are not a {shard.dtype}{list(shard.local_shape)}")
    if shard.arena_offset % ALIGN:
        raise TransferError(f"{where}: its offset {shard.arena_offset} is not a multiple of {ALIGN}")
