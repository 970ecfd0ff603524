"""Shards to full tensors: what is refused, and that any sharding gives back the tensors bit by bit."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milkweed.errors import TransferError
from milkweed.transfer import layout
from milkweed.transfer.manifest import Chunk, Manifest, RankManifest, Shard, join
from milkweed.types import PolicyVersion

VERSION = PolicyVersion(0, 3)


def rank_manifest(rank, shards, version=VERSION):
    nbytes = max((s.arena_offset + layout.aligned(s.nbytes) for s in shards), default=64)
    chunks = [Chunk(0, nbytes, 0)]
    return RankManifest(version, rank, f"agent{rank}", b"metadata", 4096, 0, nbytes, chunks, shards).sealed()


def pack(version, per_rank):
    """Manifest and the ranks' bytes for `per_rank[rank] = [(name, local tensor, shape, offsets)]`."""
    ranks, sources = [], []
    for rank, pieces in enumerate(per_rank):
        shards, offset = [], 0
        for name, tensor, shape, offsets in pieces:
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            shards.append(Shard(name, dtype, tuple(shape), tuple(offsets), tuple(tensor.shape), offset, nbytes))
            offset += layout.aligned(nbytes)
        memory = np.full(max(offset, 64), 0xAB, np.uint8)
        for shard, (_, tensor, _, _) in zip(shards, pieces, strict=True):
            if shard.nbytes:
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                memory[shard.arena_offset : shard.arena_offset + shard.nbytes] = raw
        ranks.append(rank_manifest(rank, shards, version))
        sources.append(memory)
    return Manifest(version, ranks), sources


def grid(tensor, cuts, owner):
    """The blocks of a tensor between the cuts of every dimension, dealt out to ranks by `owner(index)`."""
    boxes = [(())]
    for size, points in zip(tensor.shape, cuts, strict=True):
        edges = [0, *sorted(min(p, size) for p in points), size]
        boxes = [(*box, (a, b)) for box in boxes for a, b in zip(edges, edges[1:], strict=False)]
    for index, box in enumerate(boxes):
        yield owner(index), tensor[tuple(slice(a, b) for a, b in box)], tuple(a for a, _ in box)


@st.composite
def shardings(draw):
    ranks = draw(st.integers(1, 4))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
    tensors, per_rank = {}, [[] for _ in range(ranks)]
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3))
        bits = torch.randint(0, 255, (*shape, 8), dtype=torch.uint8)
        dtype = draw(dtypes)
        tensor = bits[..., : dtype.itemsize].contiguous().view(dtype).reshape(shape)
        cuts = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
        deal = draw(st.lists(st.integers(0, ranks - 1), min_size=27, max_size=27))
        for rank, piece, offsets in grid(tensor, cuts, lambda n, deal=deal: deal[n]):
            per_rank[rank].append((f"t{i}", piece, shape, offsets))
        tensors[f"t{i}"] = tensor
    return tensors, per_rank


@settings(max_examples=60, deadline=None)
@given(shardings())
def test_any_sharding_assembles_to_the_same_bits(case):
    tensors, per_rank = case
    manifest, sources = pack(VERSION, per_rank)
    planned = layout.plan(manifest)
    slot = np.full(planned.nbytes + 32, 0xCD, np.uint8)
    layout.assemble(planned, sources, slot)
    assert [t.name for t in planned.tensors] == sorted(tensors)
    for staged in planned.tensors:
        raw = tensors[staged.name].contiguous().reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(slot[staged.offset : staged.offset + staged.nbytes], raw), staged.name
        end = staged.offset + layout.aligned(staged.nbytes)
        assert not slot[staged.offset + staged.nbytes : end].any(), "gaps are zeroed: equal weights, equal digests"
    assert (slot[planned.nbytes :] == 0xCD).all()


@settings(max_examples=40, deadline=None)
@given(shardings(), st.randoms())
def test_a_missing_or_doubled_block_is_refused_by_name(case, random):
    _, per_rank = case
    solid = [(r, i) for r, pieces in enumerate(per_rank) for i, p in enumerate(pieces) if p[1].numel()]
    rank, index = random.choice(solid)
    name = per_rank[rank][index][0]
    gap = [list(pieces) for pieces in per_rank]
    gap[rank].pop(index)
    if any(p[0] == name for pieces in gap for p in pieces):
        with pytest.raises(TransferError, match=f"tensor {name}: elements"):
            layout.plan(pack(VERSION, gap)[0])
    per_rank[-1].append(per_rank[rank][index])
    with pytest.raises(TransferError, match=f"tensor {name}: elements .* published by ranks"):
        layout.plan(pack(VERSION, per_rank)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (5, 4)}, "rank 1 .*but trainer rank 0"),
        ({"dtype": "bfloat16", "nbytes": 16}, "bfloat16.*but trainer rank 0"),
        ({"offsets": (3, 0)}, "reaches outside"),
        ({"offsets": (-1, 0)}, "reaches outside"),
        ({"nbytes": 28}, "28 bytes are not"),
        ({"local_shape": (8,)}, "number of dimensions"),
        ({"arena_offset": 4}, "not a multiple of 64"),
    ],
)
def test_a_wrong_shard_is_refused_naming_tensor_and_rank(change, message):
    top, bottom = (Shard("w", "float32", (4, 4), (o, 0), (2, 4), 0, 32) for o in (0, 2))
    ranks = [rank_manifest(0, [top]), rank_manifest(1, [msgspec.structs.replace(bottom, **change)])]
    with pytest.raises(TransferError, match=f"tensor w.*{message}"):
        layout.plan(Manifest(VERSION, ranks))


def test_an_unknown_dtype_is_refused():
    shard = Shard("w", "float4_e2m1", (2,), (0,), (2,), 0, 1)
    with pytest.raises(TransferError, match="tensor w: dtype float4_e2m1"):
        layout.plan(Manifest(VERSION, [rank_manifest(0, [shard])]))


def test_cover_of_many_ranks_is_checked_fast():
    ranks = 512
    boxes = [((i * 3, 0), (3, 64)) for i in range(ranks)]
    layout.check_cover("w", (ranks * 3, 64), boxes, range(ranks))
    with pytest.raises(TransferError, match=r"elements \[1533:1536, 0:64\]"):
        layout.check_cover("w", (ranks * 3, 64), boxes[:-1], range(ranks - 1))


def test_a_flipped_bit_anywhere_in_a_rank_manifest_is_found():
    good = rank_manifest(0, [Shard("w", "float32", (4,), (0,), (4,), 0, 16)])
    good.check()
    for change in (
        {"metadata": b"metbdata"},
        {"address": good.address ^ 64},
        {"agent": "agent1"},
        {"version": PolicyVersion(0, 2)},
        {"chunks": [Chunk(0, 64, 1)]},
        {"shards": [Shard("w", "float32", (4,), (0,), (4,), 64, 16)]},
        {"digest": b"x" * 16},
    ):
        with pytest.raises(TransferError, match="trainer rank 0 .*altered"):
            msgspec.structs.replace(good, **change).check()


def test_chunks_that_leave_bytes_unread_are_refused():
    good = rank_manifest(0, [Shard("w", "float32", (4,), (0,), (4,), 0, 16)])
    for chunks in ([], [Chunk(0, 32, 0)], [Chunk(32, 32, 0)], [Chunk(0, 64, 0), Chunk(64, 64, 0)]):
        with pytest.raises(TransferError, match="leave bytes"):
            msgspec.structs.replace(good, chunks=chunks).sealed().check()


def test_joining_refuses_ranks_of_different_versions_and_doubles():
    shard = Shard("w", "float32", (4,), (0,), (4,), 0, 16)
    first, other = rank_manifest(0, [shard]), rank_manifest(1, [shard], PolicyVersion(1, 0))
    with pytest.raises(TransferError, match="rank 1 .*version 1.0, the manifest is of 0.3"):
        join([first, other])
    with pytest.raises(TransferError, match="twice"):
        join([first, first])
    with pytest.raises(TransferError, match="no rank"):
        join([])
    assert join([first]).nbytes == 64 and math.prod(shard.shape) == 4


def test_a_manifest_survives_msgpack():
    manifest, _ = pack(VERSION, [[("w", torch.ones(3, 2), (3, 2), (0, 0))]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest
