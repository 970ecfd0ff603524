"""Requests that an engine gives back so that another goes on from what they computed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from milkweed.rollout.sglang_engine import EngineDied
from milkweed.rollout.sglang_kv import SETTLE

KEEP_S = 0.4
"""In which what they computed is written below the engine."""


class Keeping:
    """Each is answered once the KV of all is written, or there is no more time."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._written = asyncio.Event()

    def add(self, request_id: str) -> None:
        """It has been told to stop."""
        self._ids.add(request_id)

    async def written(self, request_id: str, sglang: Any) -> None:
        """Call it when the request has stopped; for one that was not added it returns at once."""
        if request_id not in self._ids:
            return
        self._ids.discard(request_id)
        with contextlib.suppress(TimeoutError, EngineDied):  # another engine computes it; the engine's watcher finds a death
            async with asyncio.timeout(2 * KEEP_S):
                if self._ids:
                    await self._written.wait()
                else:
                    await sglang.call(SETTLE, {"within_s": KEEP_S}, 2 * KEEP_S)
        self._written.set()
