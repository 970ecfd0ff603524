"""The engine's calls (`service.py`) as endpoints of a Monarch actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from milkweed.errors import MilkweedError
from milkweed.fleet.monarch_compat import Actor, concurrent_endpoint
from milkweed.rollout.service import EngineService

T = TypeVar("T")


async def _kept(work: Awaitable[T]) -> T:
    """A CancelledError that leaves an endpoint kills its actor without a word; this makes it an ordinary error."""
    try:
        return await work
    except asyncio.CancelledError as e:
        raise MilkweedError("the call was cancelled inside the engine") from e


class EngineActor(Actor):
    """One engine in its process."""

    def __init__(self, spec: bytes) -> None:
        self._service = EngineService(spec)

    @concurrent_endpoint
    async def start(self) -> bytes:
        return await _kept(self._service.start())

    @concurrent_endpoint
    async def submit(self, requests: bytes) -> None:
        await _kept(self._service.submit(requests))

    @concurrent_endpoint
    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        return await _kept(self._service.collect(max_wait_s, linger_s))

    @concurrent_endpoint
    async def abort(self, ids: list[str], keep: bool = False) -> None:
        await _kept(self._service.abort(ids, keep))

    @concurrent_endpoint
    async def layout(self, deadline_s: float) -> bytes:
        return await _kept(self._service.layout(deadline_s))

    @concurrent_endpoint
    async def commit(self, staged: bytes, deadline_s: float, fault: str = "") -> bytes:
        return await _kept(self._service.commit(staged, deadline_s, fault))

    @concurrent_endpoint
    async def checksum(self) -> dict[str, str]:
        return await _kept(self._service.checksum())

    @concurrent_endpoint
    async def stats(self) -> bytes:
        return await _kept(self._service.stats())

    @concurrent_endpoint
    async def close(self) -> None:
        await _kept(self._service.close())
