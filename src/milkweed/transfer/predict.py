"""A plan without processes: what each trainer rank sends to each engine rank, counted, for shapes of any size.

Layers that are alike are traced once, trainer ranks are boxes and not processes, and engines of one degree are one
engine. `rollout.sglang_layout` gives the traced part, which is why this module is told the layout and does not make it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec
import numpy as np

from milkweed.errors import ConfigError
from milkweed.transfer.layout import ITEM_BYTES
from milkweed.transfer.plan import Box, EngineLayout

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Cut by columns under tensor parallelism; the other matrices by rows."""
_WHOLE = ("norm.weight", "mlp.gate.weight", "layernorm.weight")


class Degrees(msgspec.Struct, frozen=True):
    """How a trainer is cut: copies of shards of tensor-parallel parts."""

    replicate: int = 1
    shard: int = 1
    tensor_parallel: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor_parallel

    @classmethod
    def parse(cls, text: str) -> Degrees:
        """From `fsdp8`, `tp2`, `hsdp2x4` (copies x shards), or products: `fsdp128,tp8`. Raises ConfigError."""
        found = {"replicate": 1, "shard": 1, "tensor_parallel": 1}
        for part in filter(None, text.split(",")):
            match = re.fullmatch(r"(fsdp|tp|ddp)(\d+)|hsdp(\d+)x(\d+)", part.strip())
            if match is None or "0" in match.groups():
                raise ConfigError(f"--trainer {text!r}: {part!r} is none of fsdpN, tpN, ddpN, hsdpNxM")
            if match[1]:
                found[{"fsdp": "shard", "tp": "tensor_parallel", "ddp": "replicate"}[match[1]]] = int(match[2])
            else:
                found["replicate"], found["shard"] = int(match[3]), int(match[4])
        return cls(**found)


class Prediction(msgspec.Struct, kw_only=True):
    """`links[t][e]` are the bytes that trainer rank `t` of one copy sends for rank `e` of an engine, `pieces` their
    number of runs. An update sends each host every engine rank once, whatever the number of engines there."""

    tensors: int
    parameters: int
    engine_bytes: int
    links: list[list[int]]
    pieces: list[list[int]]
    trainer: Degrees
    engine_degree: int
    engines: int
    egress_bytes: int
    """Of the busiest trainer rank for one update of one host, copies sharing the work."""
    seconds: float
    """From publish to serving on one host at the bandwidth assumed: pack, read, commit, one after another."""


def boxes(shapes: dict[str, tuple[int, ...]], degrees: Degrees) -> list[list[Box]]:
    """What each rank of one copy holds: tensor-parallel part first, then its share of rows (of experts, where they are
    stacked and enough). Equal to what TorchTitan's placements give."""
    ranks: list[list[Box]] = []
    for shard in range(degrees.shard):
        for part in range(degrees.tensor_parallel):
            own: list[Box] = []
            for name, shape in shapes.items():
                box = _box(name, shape, degrees, shard, part, _experts(name, shapes))
                if box is not None:
                    own.append(box)
            ranks.append(own)
    return ranks


def _experts(name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    if _EXPERT.search(name) is None:
        return 0
    count, stem = 0, _EXPERT.sub(".experts.{}.", name)
    while stem.format(count) in shapes:
        count += 1
    return count


def _box(name: str, shape: Sequence[int], degrees: Degrees, shard: int, part: int, experts: int) -> Box | None:
    low, size = [0] * len(shape), list(shape)

    def cut(dim: int, index: int, count: int) -> None:
        share = -(-size[dim] // count)
        start = min(index * share, size[dim])
        low[dim] += start
        size[dim] = min(share, size[dim] - start)

    if degrees.tensor_parallel > 1:
        if name.endswith(_COLUMNS):
            cut(1, part, degrees.tensor_parallel)
        elif not name.endswith(_WHOLE):
            cut(0, part, degrees.tensor_parallel)
        elif part:
            return None  # a copy; one rank sends it
    if experts and degrees.shard <= experts:
        number, share = int(_EXPERT.search(name)[1]), -(-experts // degrees.shard)  # type: ignore[index]
        if number // share != shard:
            return None
    else:
        cut(0, shard, degrees.shard)
    return None if 0 in size else (name, tuple(low), tuple(size))


def predict(
    layout: EngineLayout, degrees: Degrees, *, engines: int = 1, layers: int = 0, gb_s: float = 5.0, memcpy_gb_s: float = 7.0
) -> Prediction:
    """Count what an update moves. `layout` may have been traced with one layer of `layers` that are alike (0: it is
    whole). Vectorised over trainer ranks: the time it takes grows with the pieces of one layer."""
    repeat = max(1, layers)
    held = _Held(layout.tensors, degrees)
    links = np.zeros((degrees.shard * degrees.tensor_parallel, len(layout.ranks)), np.int64)
    pieces = np.zeros_like(links)
    total = 0
    for engine, rank in enumerate(layout.ranks):
        for piece in rank.pieces:
            times = repeat if _LAYER.search(piece.tensor) else 1
            elements = held.overlap(piece.tensor, piece.offsets, piece.sizes)
            item = ITEM_BYTES[rank.parameters[piece.parameter].dtype]
            links[:, engine] += elements * item * times
            pieces[:, engine] += (elements > 0) * times
            total += math.prod(piece.sizes) * item * times
    count = {name: math.prod(s) * (repeat if _LAYER.search(name) else 1) for name, s in layout.tensors.items()}
    egress = int(links.sum(1).max() // degrees.replicate)
    arriving = total / len(layout.ranks)  # each engine rank has a link of its own
    seconds = egress / memcpy_gb_s + max(egress, arriving) / gb_s + arriving / memcpy_gb_s
    return Prediction(
        tensors=sum(repeat if _LAYER.search(n) else 1 for n in layout.tensors), parameters=sum(count.values()),
        engine_bytes=total, links=links.tolist(), pieces=pieces.tolist(), trainer=degrees, engine_degree=len(layout.ranks),
        engines=engines, egress_bytes=egress, seconds=seconds / 1e9,
    )  # fmt: skip


class _Held:
    """The boxes of all ranks of one copy, as arrays by tensor; equal shapes are cut once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], degrees: Degrees) -> None:
        self._shapes, self._degrees = shapes, degrees
        self._cut: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._counts: dict[str, int] = {}

    def overlap(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Elements of the box that each rank holds, int64 `[ranks]`."""
        low, high = self._boxes(name)
        a, b = np.array(offsets), np.array(offsets) + np.array(sizes)
        return np.clip(np.minimum(high, b) - np.maximum(low, a), 0, None).prod(1)

    def _boxes(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        shape, d = self._shapes[name], self._degrees
        stem = _EXPERT.sub(".experts.{}.", name)
        if stem not in self._counts:
            self._counts[stem] = _experts(name, self._shapes)
        experts = self._counts[stem]
        number = int(_EXPERT.search(name)[1]) if experts else 0  # type: ignore[index]
        kind = name.endswith(_COLUMNS), name.endswith(_WHOLE)
        key = (shape, kind, experts, number // -(-experts // d.shard) if experts and d.shard <= experts else -1)
        if key not in self._cut:
            found = [
                _box(name, shape, d, shard, part, experts) or (name, (0,) * len(shape), (0,) * len(shape))
                for shard in range(d.shard) for part in range(d.tensor_parallel)
            ]  # fmt: skip
            low = np.array([f[1] for f in found])
            self._cut[key] = (low, low + np.array([f[2] for f in found]))
        return self._cut[key]


def table(p: Prediction) -> str:
    """The prediction for people: trainer ranks that send alike are one line."""
    classes: dict[tuple, list[int]] = {}
    for rank, (sent, runs) in enumerate(zip(p.links, p.pieces, strict=True)):
        classes.setdefault((tuple(sent), tuple(runs)), []).append(rank)
    lines = [
        f"{p.tensors} tensors, {p.parameters / 1e9:.3f}B parameters; engine of {p.engine_degree} ranks: {_mb(p.engine_bytes)}",
        f"trainer of {p.trainer.ranks} ranks ({p.trainer.replicate} copies x {p.trainer.shard} shards x "
        f"{p.trainer.tensor_parallel} tensor parallel), {p.engines} engines",
        f"{'trainer ranks':>24}  {'sends a host':>12}  {'runs':>8}  of it to engine ranks 0.. (a link)",
    ]
    for (sent, runs), ranks in list(classes.items())[:24]:
        shown = _few(ranks)
        links = " ".join(_mb(s) for s in sent[:8]) + (" ..." if len(sent) > 8 else "")
        lines.append(f"{shown:>24}  {_mb(sum(sent)):>12}  {sum(runs):>8}  {links}")
    if len(classes) > 24:
        lines.append(f"{'':>24}  and {len(classes) - 24} more kinds of rank")
    lines.append(f"busiest rank sends {_mb(p.egress_bytes)} an update and host; predicted {p.seconds:.3g} s from publish to serving")
    return "\n".join(lines)


def _mb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def _few(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    whole = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]} ({len(ranks)})" if whole else f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)})"
