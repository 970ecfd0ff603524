"""Brings up engines: those that a mesh file asks for, and later ones in place of those that failed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from milkweed.errors import MilkweedError, RemoteError
from milkweed.fleet.processes import by_token
from milkweed.rollout import pages, sglang_pairs
from milkweed.rollout.actor import EngineActor
from milkweed.rollout.protocol import EngineRole, EngineSpec, EngineStats, decode_stats, encode
from milkweed.rollout.sglang_engine import engine_environment
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.config.mesh import TierConfig
    from milkweed.fleet import Fleet, Replica

PAGE_TOKENS = 16
"""A page of KV where a tier lies below: what is not whole pages is computed again."""


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
            arguments=self._tier(c.kv_tier, str(model), version, cpu) | c.engine,
            cpu=cpu,
        )
        self._apart = role == "rollout" and c.prefill.replicas > 0
        self._environment = lambda threads: engine_environment(
            cpu=cpu, tensor_parallel=c.tensor_parallel, threads=threads, share_prefill=c.in_batch_prefix_caching,
            tier=c.kv_tier.files_gb > 0,
        )

    def _tier(self, c: TierConfig, model: str, version: PolicyVersion, cpu: bool) -> dict[str, Any]:
        """SGLang's arguments for it."""
        if not c.memory_ratio:
            return {}
        arguments: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": c.memory_ratio, "page_size": PAGE_TOKENS}
        if cpu:
            arguments |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
        if not c.files_gb:
            return arguments
        token, folder = self.fleet.token, Path(c.folder)
        backend = {
            "backend_name": "milkweed", "module_path": "milkweed.rollout.sglang_tier", "class_name": "Tier",
            "prefetch_threshold": 2 * PAGE_TOKENS, "folder": str(folder / f"mw-{token}-kv"), "bytes": int(c.files_gb * 1e9),
            "model": model, "version": str(version), "counts": f"/dev/shm/mw-{token}-kvcounts-",
        }  # fmt: skip
        return arguments | {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(backend)}

    async def one(self, index: int, role: str = "") -> tuple[Replica, EngineStats]:
        """Engine `index` of `role` ("prefill", or the launcher's own). Raises FleetError, ConfigError or DataError; nothing is
        left of it then."""
        c, role = self.fleet.mesh.engines(self.role), role or self.role
        kind: EngineRole = "whole" if not self._apart else "prefill" if role == "prefill" else "decode"
        spec, within = encode(msgspec.structs.replace(self._spec, role=kind)), self.deadline_s
        env = self._environment(c.prefill.threads if kind == "prefill" else c.threads)
        env |= sglang_pairs.environment(kind, f"/dev/shm/mw-{self.fleet.token}-moved-")
        replica: Replica
        if self.fleet.mesh.hosts.orphan_grace_s:
            target = "milkweed.rollout.service:EngineService"
            replica = await self.fleet.serve(role, index, target, spec, env=env, deadline_s=within)
        else:
            replica = await self.fleet.spawn(role, index, EngineActor, spec, env=env, deadline_s=within)
        try:
            return replica, decode_stats(await replica.call_one("start", deadline_s=self.deadline_s))
        except BaseException as e:
            await replica.stop()
            if isinstance(e, RemoteError) and isinstance(e.__cause__, MilkweedError):
                raise e.__cause__ from None
            raise

    async def all(self) -> list[tuple[Replica, EngineStats]]:
        """Every engine of the mesh, those that stand by last, those that prefill after them. Raises as `one`; none is left
        then."""
        c = self.fleet.mesh.engines(self.role)
        if c.kv_tier.files_gb:  # what runs that are gone have left may be many gigabytes
            own = self.fleet.token
            await asyncio.to_thread(pages.sweep, Path(c.kv_tier.folder), lambda other: other == own or bool(by_token(other)))
        places = [(i, self.role) for i in range(c.replicas + c.standby)]
        places += [(i, "prefill") for i in range(c.prefill.replicas if self._apart else 0)]
        started = await asyncio.gather(*(self.one(*place) for place in places), return_exceptions=True)
        up = [s for s in started if not isinstance(s, BaseException)]
        if errors := [s for s in started if isinstance(s, BaseException)]:
            await asyncio.gather(*(replica.stop() for replica, _ in up))
            raise errors[0]
        return up
