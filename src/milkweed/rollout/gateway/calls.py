"""What stands between a request and a sample: the bare router as a policy, callers that leave, several answers at
once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from milkweed.types import Completion, Sampling

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LOOK_S = 1.0
"""How often it is looked whether the caller of a request is still there."""


class Bare:
    """The router as a policy; `name` says in errors whose samples they are."""

    def __init__(self, router: Any, name: str = "") -> None:
        self._router, self._name = router, name

    async def sample(self, token_ids: list[int], sampling: Sampling) -> Completion:
        return await self._router.sample(token_ids, sampling, name=self._name)


class Gone(Exception):
    """The caller has left."""


async def all_of(one: Callable[[], Any], count: int) -> list[Any]:
    if count == 1:
        return [await one()]
    tasks = [asyncio.ensure_future(one()) for _ in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def unless_gone(request: Request, work: Any) -> Response:
    """The work's answer; it is cancelled when the caller closes the connection, so that no engine samples for
    nobody."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=LOOK_S)
            if done:
                return task.result()
            # before the body was read, asking would take it away
            if getattr(request.state, "read", False) and await request.is_disconnected():
                raise Gone
    finally:
        task.cancel()


async def in_turn(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
