"""Brings up engines: those that a mesh file asks for, and later ones in place of those that failed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from milkweed.errors import MilkweedError, RemoteError
from milkweed.rollout.actor import EngineActor
from milkweed.rollout.protocol import EngineSpec, EngineStats, decode_stats, encode
from milkweed.rollout.sglang_engine import engine_environment
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.fleet import Fleet, Replica


class Launcher:
    """Starts engines of `role` in one fleet's mesh on the Hugging Face folder `model`, whose weights are `version`."""

    def __init__(self, fleet: Fleet, model: str, *, role: str, version: PolicyVersion, dtype: str, deadline_s: float) -> None:
        c, cpu = fleet.mesh.engines(role), fleet.mesh.device == "cpu"
        self.fleet, self.role, self.deadline_s = fleet, role, deadline_s
        self._spec = EngineSpec(
            model=str(model),
            dtype=dtype,
            tensor_parallel=c.tensor_parallel,
            version=version,
            arguments=dict(c.engine),
            cpu=cpu,
        )
        self._env = engine_environment(cpu=cpu, tensor_parallel=c.tensor_parallel, threads=c.threads)

    async def one(self, index: int) -> tuple[Replica, EngineStats]:
        """Engine `index`. Raises FleetError, ConfigError or DataError; nothing is left of it then."""
        spec, env, within = encode(self._spec), self._env, self.deadline_s
        replica: Replica
        if self.fleet.mesh.hosts.orphan_grace_s:
            target = "milkweed.rollout.service:EngineService"
            replica = await self.fleet.serve(self.role, index, target, spec, env=env, deadline_s=within)
        else:
            replica = await self.fleet.spawn(self.role, index, EngineActor, spec, env=env, deadline_s=within)
        try:
            return replica, decode_stats(await replica.call_one("start", deadline_s=self.deadline_s))
        except BaseException as e:
            await replica.stop()
            if isinstance(e, RemoteError) and isinstance(e.__cause__, MilkweedError):
                raise e.__cause__ from None
            raise

    async def all(self) -> list[tuple[Replica, EngineStats]]:
        """Every engine of the mesh, those that stand by last. Raises as `one`; none is left then."""
        c = self.fleet.mesh.engines(self.role)
        count = range(c.replicas + c.standby)
        started = await asyncio.gather(*(self.one(i) for i in count), return_exceptions=True)
        up = [s for s in started if not isinstance(s, BaseException)]
        if errors := [s for s in started if isinstance(s, BaseException)]:
            await asyncio.gather(*(replica.stop() for replica, _ in up))
            raise errors[0]
        return up
