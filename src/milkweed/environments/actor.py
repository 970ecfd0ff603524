"""The actors of the reward and environment roles: a scoring pool (`children.py`) and a workshop (`workshop.py`) behind
a few endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

from milkweed.environments.children import Limits, ScoringPool
from milkweed.environments.items import decode_items, encode
from milkweed.environments.workshop import Workshop
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


class EnvironmentActor(Actor):
    """A process that runs trajectories. `setup` is what `workers.setup_of` gives."""

    def __init__(self, setup: bytes) -> None:
        self._shop = Workshop(setup)

    @concurrent_endpoint
    async def push(self, commands: list[tuple[Any, ...]], functions: dict[str, bytes]) -> None:
        """See `Workshop.push`."""
        self._shop.push(commands, functions)

    @concurrent_endpoint
    async def pull(self, max_wait_s: float) -> list[bytes]:
        """See `Workshop.pull`."""
        return await asyncio.to_thread(self._shop.pull, max_wait_s)

    async def __cleanup__(self, exc: Any) -> None:
        await asyncio.to_thread(self._shop.close)
