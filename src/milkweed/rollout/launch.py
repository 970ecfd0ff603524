"""Brings up the engines that a mesh file asks for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from milkweed.errors import MilkweedError, RemoteError
from milkweed.rollout.actor import EngineActor
from milkweed.rollout.protocol import EngineSpec, EngineStats, decode_stats, encode
from milkweed.rollout.records import EngineReplica
from milkweed.rollout.sglang_engine import engine_environment
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.fleet import Fleet


async def launch_engines(
    fleet: Fleet, model: str, *, role: str, version: PolicyVersion, dtype: str, deadline_s: float
) -> list[tuple[EngineReplica, EngineStats]]:
    """All engines of `role` in the fleet's mesh, serving `model`. Raises as `Router.spawn`."""
    c, cpu = fleet.mesh.engines(role), fleet.mesh.device == "cpu"
    spec = EngineSpec(
        model=str(model),
        dtype=dtype,
        tensor_parallel=c.tensor_parallel,
        version=version,
        arguments=dict(c.engine),
        cpu=cpu,
    )
    env = engine_environment(cpu=cpu, tensor_parallel=c.tensor_parallel, threads=c.threads)

    async def one(index: int) -> tuple[EngineReplica, EngineStats]:
        replica = await fleet.spawn(role, index, EngineActor, encode(spec), env=env, deadline_s=deadline_s)
        try:
            return replica, decode_stats(await replica.call_one("start", deadline_s=deadline_s))
        except BaseException as e:
            await replica.stop()
            if isinstance(e, RemoteError) and isinstance(e.__cause__, MilkweedError):
                raise e.__cause__ from None
            raise

    started = await asyncio.gather(*(one(i) for i in range(c.replicas)), return_exceptions=True)
    up = [s for s in started if not isinstance(s, BaseException)]
    if errors := [s for s in started if isinstance(s, BaseException)]:
        await asyncio.gather(*(replica.stop() for replica, _ in up))
        raise errors[0]
    return up
