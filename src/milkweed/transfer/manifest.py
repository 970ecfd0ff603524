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


class Region(msgspec.Struct, frozen=True, array_like=True):
    """`nbytes` at `offset` of a rank's slot that go to byte `to` of an engine layout: in one run, or as rows of
    `row_bytes` that lie `step` bytes apart there."""

    to: int
    offset: int
    nbytes: int
    row_bytes: int = 0
    step: int = 0


class Target(msgspec.Struct, frozen=True):
    """What a share is packed for: the layout's digest, the dtype sent, the length of the layout and the bytes that all
    ranks' shares together bring."""

    layout: str
    dtype: str
    nbytes: int
    payload: int


class Chunk(msgspec.Struct, frozen=True):
    """A run of bytes of a slot that is read and verified as one; `digest` is xxh3-64."""

    offset: int
    nbytes: int
    digest: int


class RankManifest(msgspec.Struct, frozen=True):
    """One trainer rank's share of a version.

    `metadata` is the NIXL agent's. `address` is the slot's start. `digest` is blake2b over all the other fields: NIXL
    accepts many a flipped bit in its metadata, and a flipped offset would put right bytes in the wrong place.

    A share packed for the readers has `regions` in place of shards; every chunk lies in one of them. `payload` counts
    its bytes without gaps.
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
    target: Target | None = None
    regions: list[Region] = []
    payload: int = 0

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
        length = self.target.nbytes if self.target else 0
        for r in self.regions:
            rows = -(-r.nbytes // r.row_bytes) if r.row_bytes else 1
            last = r.to + ((rows - 1) * r.step + r.row_bytes if r.row_bytes else r.nbytes)
            if min(r.to, r.offset, r.nbytes) < 0 or r.offset + r.nbytes > self.nbytes or last > length:
                raise TransferError(f"{self.peer}: its region {r.to}:{last} reaches outside the engine's layout or its slot")
        if self.target is not None:
            tiles = iter(self.chunks)
            for r in self.regions:
                end = r.offset
                while end < r.offset + r.nbytes:
                    chunk = next(tiles, None)
                    if chunk is None or chunk.offset != end or not 0 < chunk.nbytes <= r.offset + r.nbytes - end:
                        raise TransferError(f"{self.peer}: its chunks leave bytes {end}:{r.offset + r.nbytes} unread")
                    if r.row_bytes and chunk.nbytes % r.row_bytes:
                        raise TransferError(f"{self.peer}: its chunk at {end} cuts a row")
                    end += chunk.nbytes
            return
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
        if self.target is not None:
            return f"of the packed form, {self.target.dtype or 'as it is'}"
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
            if rank.target != self.ranks[0].target:
                raise TransferError(f"{rank.peer} packed version {self.version} for another engine than {self.ranks[0].peer}")
        target = self.ranks[0].target
        if target is not None and (got := sum(r.payload for r in self.ranks)) != target.payload:
            raise TransferError(f"version {self.version}: the ranks bring {got} bytes of the engine's {target.payload}")


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
    """A version that arrived whole on a host: in one shared-memory file, from which engines commit.

    `offset` is the slot's start in the file; tensor offsets count from there. `digest` is xxh3-64 of the slot.
    `seconds` is what its pull took: planning, reading, verifying and assembling.

    With `layout` (an EngineLayout's digest) the slot holds the parameters of the engines' ranks as they lie in memory,
    in `dtype`, and no tensors by name; its `stamp` takes the place of the digest. `ranges` are then what differs from
    version `base`, None if that is not known.
    """

    version: PolicyVersion
    path: str
    offset: int
    nbytes: int
    digest: int
    tensors: list[StagedTensor]
    seconds: float = 0.0
    layout: str = ""
    dtype: str = ""
    stamp: int = 0
    base: PolicyVersion | None = None
    ranges: list[tuple[int, int]] | None = None


class Grant(msgspec.Struct, frozen=True):
    """A slot that trainer ranks of this host may fill, until it is staged or revoked."""

    path: str
    offset: int
    nbytes: int
    stamp: int
