"""The reward role's actor: a scoring pool behind three endpoints. All its work is in `children.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from milkweed.environments.children import Limits, ScoringPool
from milkweed.environments.items import decode_items, encode
from milkweed.fleet import Actor, concurrent_endpoint


class RewardActor(Actor):
    """`children` processes that run reward functions. Endpoints overlap: a long poll does not hold up a submit."""

    def __init__(self, children: int = 2, limits: Limits | None = None) -> None:
        self._pool = ScoringPool(children, limits)

    @concurrent_endpoint
    async def submit(self, items: bytes, functions: dict[str, bytes], cancel: list[int]) -> None:
        """Queue items (a list of Item as MessagePack). See `ScoringPool.submit`."""
        self._pool.submit(decode_items(items), functions, cancel)

    @concurrent_endpoint
    async def collect_stats(self, max_wait_s: float) -> bytes:
        """Outcomes so far, after at most `max_wait_s`, and the pool's `stats`, as MessagePack."""
        return encode(await asyncio.to_thread(self._pool.collect_stats, max_wait_s))

    @concurrent_endpoint
    async def close(self) -> None:
        """End every child."""
        await asyncio.to_thread(self._pool.close)

    async def __cleanup__(self, exc: Any) -> None:
        await asyncio.to_thread(self._pool.close)
