"""What travels about a version of the weights: where its bytes lie, how they are cut, and their checksums.

Data only (msgspec, no torch): a manifest goes over Monarch, the bytes it describes never do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from milkweed.errors import TransferError
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
    """One trainer rank's share of a version.

    `metadata` is the NIXL agent's. `address` is the slot's start. `digest` is blake2b over all the other fields: NIXL
    accepts many a flipped bit in its metadata, and a flipped offset would put right bytes in the wrong place.
    """

    version: PolicyVersion
    rank: int
    agent: str
    metadata: bytes
    address: int
    slot: int
    nbytes: int
    chunks: list[Chunk]
    shards: list[Shard]
    digest: bytes = b""

    @property
    def peer(self) -> str:
        """The rank's name in errors."""
        return f"trainer rank {self.rank} ({self.agent})"

    def sealed(self) -> RankManifest:
        """This manifest with its `digest` filled in."""
        return msgspec.structs.replace(self, digest=self._digest())

    def check(self) -> None:
        """Raises TransferError unless `digest` fits the rest, the chunks tile the slot and the shards lie in it."""
        if self._digest() != self.digest:
            raise TransferError(
                f"{self.peer}: its manifest of version {self.version} was altered on the way (digest differs)"
            )
        for shard in self.shards:
            if shard.arena_offset < 0 or shard.nbytes < 0 or shard.arena_offset + shard.nbytes > self.nbytes:
                raise TransferError(f"{self.peer}: tensor {shard.name} reaches outside its slot of {self.nbytes} bytes")
        end = 0
        for chunk in self.chunks:
            if chunk.offset != end or chunk.nbytes <= 0:
                raise TransferError(f"{self.peer}: its chunks leave bytes {end}:{chunk.offset} unread")
            end += chunk.nbytes
        if end != self.nbytes:
            raise TransferError(f"{self.peer}: its chunks leave bytes {end}:{self.nbytes} unread")

    def tensors_in(self, chunk: Chunk) -> str:
        """Names of the tensors that have bytes in `chunk`, shortened, for errors."""
        end = chunk.offset + chunk.nbytes
        names = [s.name for s in self.shards if s.arena_offset < end and s.arena_offset + s.nbytes > chunk.offset]
        return ", ".join(names if len(names) <= 2 else [names[0], "...", names[-1]])

    def _digest(self) -> bytes:
        bare = msgspec.structs.replace(self, digest=b"")
        return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()


class Manifest(msgspec.Struct, frozen=True):
    """A whole version: the shares of all ranks that publish (replicas of the same data publish once)."""

    version: PolicyVersion
    ranks: list[RankManifest]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranks)

    def check(self) -> None:
        """Raises TransferError naming the rank whose share is altered, of another version, or there twice."""
        if not self.ranks:
            raise TransferError(f"the manifest of version {self.version} has no ranks")
        seen: set[int] = set()
        for rank in self.ranks:
            rank.check()
            if rank.version != self.version:
                raise TransferError(f"{rank.peer} published version {rank.version}, the manifest is of {self.version}")
            if rank.rank in seen:
                raise TransferError(f"{rank.peer} is in the manifest of version {self.version} twice")
            seen.add(rank.rank)


def join(ranks: Sequence[RankManifest]) -> Manifest:
    """The whole version from its ranks' shares. Raises TransferError if they are not of one version."""
    if not ranks:
        raise TransferError("no rank published anything: there is no version to hand on")
    manifest = Manifest(ranks[0].version, list(ranks))
    manifest.check()
    return manifest


class StagedTensor(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Staged(msgspec.Struct, frozen=True):
    """A version that arrived whole on a host: full tensors in one shared-memory file, from which engines commit.

    `offset` is the slot's start in the file; tensor offsets count from there. `digest` is xxh3-64 of the slot.
    `seconds` is what its pull took: planning, reading, verifying and assembling.
    """

    version: PolicyVersion
    path: str
    offset: int
    nbytes: int
    digest: int
    tensors: list[StagedTensor]
    seconds: float = 0.0
