"""The engine's calls as bytes in and out, each message MessagePack for many requests, whoever carries them."""

from __future__ import annotations

import msgspec

from milkweed.rollout.engine import RolloutEngine
from milkweed.rollout.protocol import EngineSpec, decode_requests, encode
from milkweed.transfer.manifest import Staged


class EngineService:
    """Hosts one engine in its process. Made in an instant; `start` loads the model."""

    def __init__(self, spec: bytes) -> None:
        self._engine = RolloutEngine(msgspec.msgpack.decode(spec, type=EngineSpec))

    async def start(self) -> bytes:
        return encode(await self._engine.start())

    async def submit(self, requests: bytes) -> None:
        await self._engine.submit(decode_requests(requests))

    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        return encode(await self._engine.collect(max_wait_s, linger_s))

    async def abort(self, ids: list[str], keep: bool = False) -> None:
        await self._engine.abort(ids, keep)

    async def layout(self, deadline_s: float) -> bytes:
        return await self._engine.layout(deadline_s)

    async def commit(self, staged: bytes, deadline_s: float, fault: str = "") -> bytes:
        return encode(await self._engine.commit(msgspec.msgpack.decode(staged, type=Staged), deadline_s, fault))

    async def checksum(self) -> dict[str, str]:
        return await self._engine.checksum()

    async def stats(self) -> bytes:
        return encode(self._engine.stats())

    async def close(self) -> None:
        await self._engine.close()

    async def forsaken(self) -> None:
        """Its controller has gone; another may come."""
        await self._engine.forsake()
