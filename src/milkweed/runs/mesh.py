"""A live mesh: the trainer, the engines, the reward workers and the plane between them, held in one hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from milkweed.config import MeshConfig, load_mesh
from milkweed.errors import ConfigError, FleetError, MilkweedError, TransferError
from milkweed.fleet import Fleet, Replica
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.data import Chat
    from milkweed.environments import Scorer
    from milkweed.rollout import Router
    from milkweed.training import Trainer, TrainerConfig

T = TypeVar("T")


async def whole(work: Awaitable[T]) -> T:
    """Await `work` so that being interrupted does not cut it in two: it is finished first, then the interrupt goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])  # every remote call inside has its deadline, so this ends
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() from None  # type: ignore[misc]
        raise


class Mesh:
    """What `up` returns. `trainer`, `rollout`, `reward`, `reference` are None where the mesh has no such role."""

    def __init__(self, config: MeshConfig, fleet: Fleet, model: Path) -> None:
        self.config, self.fleet, self.model = config, fleet, model
        self.trainer: Trainer | None = None
        self.reference: Trainer | None = None
        self.rollout: Router | None = None
        self.reward: Scorer | None = None
        self.chat: Chat | None = None
        self.pullers: list[Replica] = []
        self.update_deadline_s = 120.0

    async def publish(self) -> dict[str, float]:
        """Give every engine the trainer's weights: publish, pull, verify, commit. Whole or not at all for each engine.

        Returns the seconds of each part, measured in the processes that did it, and `bytes`. Raises TransferError
        where no engine got them; one that failed alone serves nothing until a later update succeeds.
        """
        if self.trainer is None or self.rollout is None:
            raise ConfigError("publish needs the roles trainer and rollout in the mesh")
        return await whole(self._publish())

    async def _publish(self) -> dict[str, float]:
        assert self.trainer is not None and self.rollout is not None
        deadline = self.update_deadline_s
        manifest = await self.trainer.publish([p.name for p in self.pullers])

        async def pull(puller: Replica):
            try:
                return await puller.call_one("pull", manifest, deadline, deadline_s=deadline + 10)
            finally:
                await self.trainer.release(puller.name, manifest.version)  # type: ignore[union-attr]

        pulled = await asyncio.gather(*(pull(p) for p in self.pullers), return_exceptions=True)
        staged, failures = {}, []
        for puller, result in zip(self.pullers, pulled):
            if isinstance(result, MilkweedError):
                failures.append(f"{puller.name}: {result}")
            elif isinstance(result, BaseException):
                raise result
            else:
                staged[puller.host.name] = result
        if not staged:
            raise TransferError(f"no host got version {manifest.version}: {'; '.join(failures)}")
        report = await self.rollout.update_weights(staged, manifest.version, deadline_s=deadline)
        seconds = {"publish": self.trainer.publish_s, "pull": max(s.seconds for s in staged.values()), "commit": report.seconds}
        return {**seconds, "update": sum(seconds.values()), "bytes": float(manifest.nbytes)}

    @property
    def version(self) -> PolicyVersion:
        """The trainer's version."""
        assert self.trainer is not None
        return self.trainer.version

    async def down(self) -> None:
        """End every process of the mesh and give back what it held. Safe to call twice."""
        for part in (self.rollout, self.reward):
            if part is not None:
                await part.close()
        await self.fleet.stop()

    async def __aenter__(self) -> Mesh:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.down()
