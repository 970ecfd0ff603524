"""What travels about a version of the weights: where its bytes lie, how they are cut, and their checksums.

Data only (msgspec, no torch): a manifest goes over Monarch, the bytes it describes never do.
"""

from __future__ import annotations

import msgspec

from milkweed.types import PolicyVersion


class Shard(msgspec.Struct, frozen=True):
    """One rank's contiguous piece of one tensor, under its Hugging Face name.

    The piece covers `[o, o + n)` of every dimension for `o, n` in `zip(offsets, local_shape)` of a tensor of `shape`.
    It lies `arena_offset` bytes into the rank's slot and is `nbytes` long.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    arena_offset: int
    nbytes: int


class Chunk(msgspec.Struct, frozen=True):
    """A run of bytes of a slot that is read and verified as one; `digest` is xxh3-64."""

    offset: int
    nbytes: int
    digest: int


class RankManifest(msgspec.Struct, frozen=True):
    """One trainer rank's share of a version. `metadata` is the NIXL agent's, checked against its blake2b
    `metadata_digest` before use, since NIXL often accepts flipped bits. `address` is the slot's start."""

    rank: int
    agent: str
    metadata: bytes
    metadata_digest: bytes
    address: int
    slot: int
    nbytes: int
    chunks: list[Chunk]
    shards: list[Shard]


class Manifest(msgspec.Struct, frozen=True):
    """A whole version: the shares of all ranks that publish (replicas of the same data publish once)."""

    version: PolicyVersion
    ranks: list[RankManifest]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranks)


class StagedTensor(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Staged(msgspec.Struct, frozen=True):
    """A version that arrived whole on a host: full tensors in one shared-memory file, from which engines commit.

    `offset` is the slot's start in the file; tensor offsets count from there. `digest` is xxh3-64 of the slot.
    """

    version: PolicyVersion
    path: str
    offset: int
    nbytes: int
    digest: int
    tensors: list[StagedTensor]
