"""The plan: which elements of which Hugging Face tensor lie where in which engine rank's parameters, and with that,
which bytes of which trainer shard go where. Data only, made once, the same for every version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from milkweed.errors import TransferError
from milkweed.transfer.layout import ITEM_BYTES, aligned, check_cover, item_bytes

Box = tuple[str, Sequence[int], Sequence[int]]
"""`(Hugging Face name, offsets, sizes)`: what a trainer rank holds of a tensor."""


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One parameter of an engine rank; its memory lies at `offset` of the rank's image, `nbytes` long."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The box `[o, o + n)` of a Hugging Face tensor goes into a parameter (by number): its first element to element
    `base` of the parameter's memory, and `strides` elements further for each step along each dimension."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    parameter: int
    base: int
    strides: tuple[int, ...]


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of one engine rank and what fills them. `nbytes` is the length of its image."""

    parameters: list[Parameter]
    pieces: list[Piece]
    nbytes: int


class EngineLayout(msgspec.Struct, frozen=True):
    """All tensor-parallel ranks of an engine, their images one after another. `tensors` are the model's, by Hugging
    Face name. Engines of one model, dtype and degree have equal layouts, and equal digests."""

    tensors: dict[str, tuple[int, ...]]
    ranks: list[RankLayout]

    @property
    def starts(self) -> list[int]:
        """Where each rank's image begins; one more for the end."""
        starts = [0]
        for rank in self.ranks:
            starts.append(starts[-1] + aligned(rank.nbytes, 4096))
        return starts

    @property
    def nbytes(self) -> int:
        return self.starts[-1]

    @property
    def payload(self) -> int:
        """Bytes of the parameters, without the gaps."""
        return sum(p.nbytes for r in self.ranks for p in r.parameters)

    def digest(self) -> str:
        raw = msgspec.msgpack.Encoder(order="deterministic").encode(self)
        return hashlib.blake2b(raw, digest_size=12).hexdigest()

    def as_dtype(self, dtype: str) -> EngineLayout:
        """The same with floating-point parameters of another dtype: what travels when `dtype` is asked for."""

        def cast(rank: RankLayout) -> RankLayout:
            table, offset = [], 0
            for p in rank.parameters:
                sent = dtype if p.dtype in ("float32", "bfloat16", "float16") else p.dtype
                nbytes = p.nbytes // ITEM_BYTES[p.dtype] * ITEM_BYTES[sent]
                table.append(Parameter(p.name, sent, p.shape, offset, nbytes))
                offset += aligned(nbytes)
            return RankLayout(table, rank.pieces, offset)

        return EngineLayout(self.tensors, [cast(r) for r in self.ranks])

    def check(self) -> None:
        """Raises TransferError unless every parameter lies in its image and every piece in its parameter."""
        for number, rank in enumerate(self.ranks):
            for p in rank.parameters:
                if p.nbytes != math.prod(p.shape) * item_bytes(p.dtype, p.name) or p.offset + p.nbytes > rank.nbytes:
                    raise TransferError(f"parameter {p.name} of engine rank {number} does not lie in its image")
            for piece in rank.pieces:
                last = piece.base + sum((n - 1) * s for n, s in zip(piece.sizes, piece.strides, strict=True))
                p = rank.parameters[piece.parameter]
                if piece.base < 0 or last >= math.prod(p.shape):
                    raise TransferError(f"tensor {piece.tensor} reaches outside parameter {p.name}")


@dataclass(frozen=True)
class Move:
    """Elements of one shard that go to one place: `sizes` of them, from element `source` of the shard's memory with
    `source_strides`, to byte `to` of the layout with `strides` (in elements)."""

    shard: int
    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    to: int
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @property
    def run(self) -> bool:
        """Whether its bytes at the target follow on each other."""
        return self.strides == _contiguous(self.sizes)

    @property
    def rows(self) -> tuple[int, int, int]:
        """`(rows, bytes of a row, bytes from row to row)` at the target. Moves are kept to at most one such jump."""
        item = ITEM_BYTES[self.dtype]
        if self.run:
            return 1, self.nbytes, self.nbytes
        return self.sizes[0], math.prod(self.sizes[1:]) * item, self.strides[0] * item


def moves(layout: EngineLayout, boxes: Sequence[Box]) -> list[Move]:
    """What one trainer rank that holds `boxes` sends to an engine, in the order of where it goes. Raises TransferError
    for a tensor that the engine does not know, unless it is a tied head."""
    by_name: dict[str, list[int]] = {}
    for i, (name, _, _) in enumerate(boxes):
        by_name.setdefault(name, []).append(i)
    if unknown := sorted(by_name.keys() - layout.tensors.keys()):
        raise TransferError(f"the engine's model has no tensor {', '.join(unknown[:4])}")
    found: list[Move] = []
    for rank, start in zip(layout.ranks, layout.starts, strict=False):
        for piece in rank.pieces:
            parameter = rank.parameters[piece.parameter]
            for i in by_name.get(piece.tensor, ()):
                _, offsets, sizes = boxes[i]
                low = tuple(map(max, piece.offsets, offsets))
                high = tuple(min(a + n, b + m) for a, n, b, m in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True))
                if all(h > l for l, h in zip(low, high, strict=True)):
                    found += _move(i, offsets, sizes, piece, parameter, start, low, high)
    found.sort(key=lambda m: m.to)
    return found


def _move(
    shard: int, offsets: Sequence[int], sizes: Sequence[int], piece: Piece, parameter: Parameter, start: int,
    low: Sequence[int], high: Sequence[int],
) -> Iterable[Move]:  # fmt: skip
    whole = _contiguous(tuple(sizes))
    source = sum((l - o) * s for l, o, s in zip(low, offsets, whole, strict=True))
    base = piece.base + sum((l - o) * s for l, o, s in zip(low, piece.offsets, piece.strides, strict=True))
    dims = [(h - l, f, t) for l, h, f, t in zip(low, high, whole, piece.strides, strict=True) if h - l > 1]
    dims = _joined(sorted(dims, key=lambda d: -d[2]))  # by how far apart at the target
    # at most one jump at the target: what is left of the outer dimensions is unrolled
    item = ITEM_BYTES[parameter.dtype]
    heads = [(source, base)]
    while len(dims) > 1 and not _inner_runs(dims[1:]):
        n, f, t = dims.pop(0)
        heads = [(s + i * f, b + i * t) for s, b in heads for i in range(n)]
    for s, b in heads:
        yield Move(
            shard, tuple(d[0] for d in dims), s, tuple(d[1] for d in dims),
            start + parameter.offset + b * item, tuple(d[2] for d in dims), parameter.dtype,
        )  # fmt: skip


def _joined(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring dimensions that are one in both memories."""
    out: list[tuple[int, int, int]] = []
    for n, f, t in dims:
        if out and out[-1][1] == n * f and out[-1][2] == n * t:
            m, _, _ = out.pop()
            out.append((m * n, f, t))
        else:
            out.append((n, f, t))
    return out


def _inner_runs(dims: list[tuple[int, int, int]]) -> bool:
    step = 1
    for n, _, t in reversed(dims):
        if t != step:
            return False
        step *= n
    return True


def check_complete(layout: EngineLayout, boxes: Sequence[Sequence[Box]]) -> None:
    """Raises TransferError, naming the tensor and the ranks, unless the ranks' boxes cover every tensor that an engine
    loads exactly once."""
    held: dict[str, list[tuple[tuple[Sequence[int], Sequence[int]], int]]] = {}
    for rank, own in enumerate(boxes):
        for name, offsets, sizes in own:
            held.setdefault(name, []).append(((offsets, sizes), rank))
    for name in {p.tensor for r in layout.ranks for p in r.pieces}:
        parts = held.get(name, [])
        if not parts:
            raise TransferError(f"tensor {name} is loaded by the engines, but no trainer rank has it")
        check_cover(name, layout.tensors[name], [b for b, _ in parts], [r for _, r in parts])


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return tuple(strides[::-1])
