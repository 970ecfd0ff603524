"""The engine as a Monarch actor: messages in and out are MessagePack bytes, each for many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from milkweed.errors import MilkweedError
from milkweed.fleet.monarch_compat import Actor, concurrent_endpoint
from milkweed.rollout.engine import RolloutEngine
from milkweed.rollout.protocol import EngineSpec, decode_requests, encode
from milkweed.transfer.manifest import Staged

T = TypeVar("T")


async def _kept(work: Awaitable[T]) -> T:
    """A CancelledError that leaves an endpoint kills its actor without a word; this makes it an ordinary error."""
    try:
        return await work
    except asyncio.CancelledError as e:
        raise MilkweedError("the call was cancelled inside the engine") from e


class EngineActor(Actor):
    """Hosts one engine in its process. Made in an instant; `start` loads the model."""

    def __init__(self, spec: bytes) -> None:
        self._engine = RolloutEngine(msgspec.msgpack.decode(spec, type=EngineSpec))

    @concurrent_endpoint
    async def start(self) -> bytes:
        return encode(await _kept(self._engine.start()))

    @concurrent_endpoint
    async def submit(self, requests: bytes) -> None:
        await _kept(self._engine.submit(decode_requests(requests)))

    @concurrent_endpoint
    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        return encode(await _kept(self._engine.collect(max_wait_s, linger_s)))

    @concurrent_endpoint
    async def abort(self, ids: list[str]) -> None:
        await _kept(self._engine.abort(ids))

    @concurrent_endpoint
    async def layout(self, deadline_s: float) -> bytes:
        return await _kept(self._engine.layout(deadline_s))

    @concurrent_endpoint
    async def commit(self, staged: bytes, deadline_s: float, fault: str = "") -> bytes:
        return encode(await _kept(self._engine.commit(msgspec.msgpack.decode(staged, type=Staged), deadline_s, fault)))

    @concurrent_endpoint
    async def checksum(self) -> dict[str, str]:
        return await _kept(self._engine.checksum())

    @concurrent_endpoint
    async def stats(self) -> bytes:
        return encode(self._engine.stats())

    @concurrent_endpoint
    async def close(self) -> None:
        await _kept(self._engine.close())
