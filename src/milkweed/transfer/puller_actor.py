"""A puller in a Monarch process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from milkweed.errors import TransferError
from milkweed.transfer.manifest import Grant, Manifest, RankManifest, Staged
from milkweed.transfer.puller import Puller
from milkweed.types import PolicyVersion


class PullerActor(Actor):
    """A `Puller` in a Monarch process of its own; its endpoints overlap, so holds and status answer during a pull."""

    def __init__(self, token: str, name: str = "puller") -> None:
        self._puller = Puller(token, name)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest, deadline_s: float, holders: Sequence[str] = ()) -> Staged:
        try:
            return await self._puller.pull(manifest, deadline_s, holders)
        except asyncio.CancelledError as error:  # escaping an endpoint it would silently kill the actor
            raise TransferError(f"the pull of version {manifest.version} was cancelled") from error

    @concurrent_endpoint
    async def grant(self, nbytes: int, layout: str) -> Grant:
        return self._puller.grant(nbytes, layout)

    @concurrent_endpoint
    async def stage(self, staged: Staged, holders: Sequence[str] = ()) -> None:
        self._puller.stage(staged, holders)

    @concurrent_endpoint
    async def revoke(self) -> None:
        self._puller.revoke()

    @concurrent_endpoint
    async def expect(self, manifest: Manifest) -> list[tuple[int, int]]:
        return self._puller.expect(manifest)

    @concurrent_endpoint
    async def receive(self, rank: int, chunk: int, data: bytes) -> None:
        self._puller.receive(rank, chunk, data)

    @concurrent_endpoint
    async def complete(self, holders: Sequence[str] = ()) -> Staged:
        return self._puller.complete(holders)

    @concurrent_endpoint
    async def offer(self, version: PolicyVersion, reader: str) -> RankManifest:
        return await asyncio.to_thread(self._puller.offer, version, reader)

    @concurrent_endpoint
    async def hold(self, holder: str, version: PolicyVersion) -> Staged:
        return self._puller.hold(holder, version)

    @concurrent_endpoint
    async def release(self, holder: str, version: PolicyVersion | None = None) -> None:
        self._puller.release(holder, version)

    @concurrent_endpoint
    async def keep_only(self, served: dict[str, PolicyVersion]) -> None:
        self._puller.keep_only(served)

    @concurrent_endpoint
    async def status(self) -> dict[str, Any]:
        return self._puller.status()

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self._puller.close)
