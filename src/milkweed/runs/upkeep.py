"""What keeps a live mesh whole: engines, pullers and reward workers that fail are replaced; engines come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from milkweed.errors import ConfigError, FleetError, PeerDied
from milkweed.fleet.supervision import Budget, Event, Supervisor
from milkweed.transfer.puller_actor import PullerActor

if TYPE_CHECKING:
    from milkweed.environments import Scorer
    from milkweed.fleet import Fleet, Replica
    from milkweed.rollout import Router
    from milkweed.rollout.records import EngineReplica
    from milkweed.runs.weights import WeightPlane


class Upkeep:
    """Of one mesh. `weights` is None where there is no trainer."""

    def __init__(
        self, fleet: Fleet, router: Router, pullers: list[Replica], weights: WeightPlane | None, scorer: Scorer | None, *,
        note: Callable[[Event], None], budget: Budget = Budget(), deadline_s: float = 120.0,
    ) -> None:  # fmt: skip
        self.fleet, self.router, self.pullers, self.weights, self.deadline_s = fleet, router, pullers, weights, deadline_s
        self._engines = Supervisor("rollout", self._bring_engine, ended=router.end, note=note, budget=budget)
        self._pullers = Supervisor("puller", self._bring_puller, ended=router.end, note=note, budget=budget)
        for engine in router.crew:
            self._engines.serving(int(engine.replica.name.removeprefix("rollout")))
        for puller in pullers:
            self._pullers.serving(puller.index)
            puller.on_failure(self._puller_lost)
        self.scorer = scorer
        self._rewards = Supervisor("reward", self._bring_reward, ended=self._no_rewards, note=note, budget=budget)
        workers = [r for r in fleet.replicas if r.role == "reward"]
        for worker in workers:
            self._rewards.serving(worker.index)
            worker.on_failure(self._reward_lost)
        if scorer is not None and workers:
            scorer.on_lost = lambda worker, error: self._rewards.failed(int(worker.name.removeprefix("reward")), error)
        router.on_lost = self._engine_lost
        self._notices = asyncio.ensure_future(self._watch_notices()) if fleet.mesh.hosts.notice else None
        self._leaving: set[asyncio.Task[None]] = set()
        router.scaling = self.scale

    async def scale(self, engines: int, *, within_s: float = 30.0) -> None:
        """Let `engines` serve. More are started, and serve once they have the weights; the last ones leave, finishing what
        they have within `within_s`, after which others do it. Raises what kept a new one from serving."""
        if engines < 1:
            raise ConfigError(f"rollout.scale({engines}): at least 1 engine must serve")
        standby = self.fleet.mesh.rollout.standby
        have = sorted(self._engines.places)
        self.router.crew.wanted = engines
        leaving = have[engines + standby :]
        for index in leaving:
            await self._engines.drop(index)
        await asyncio.gather(*(self.router.leave(f"rollout{i}", within_s=within_s) for i in leaving))
        free = (i for i in range(engines + standby + len(have)) if i not in have)
        await asyncio.gather(*(self._engines.add(next(free)) for _ in range(engines + standby - len(have))))
        self.router.crew.muster()

    async def close(self) -> None:
        """Nothing is replaced any more."""
        for task in [*self._leaving, *([self._notices] if self._notices else [])]:
            task.cancel()
        await self._engines.close()
        await self._pullers.close()
        await self._rewards.close()

    def notice(self, host: int, *, taken: bool = True) -> None:
        """That host is about to be taken away (or not any more). Its engines take nothing new and finish what they have
        within the mesh's `hosts.notice_s`; others in their places begin on other hosts at once, or wait for one."""
        where = self.fleet.hosts[host]
        if where.leaving == taken:
            return
        where.leaving = taken
        for engine in [e for e in self.router.crew.living if taken and e.replica.host is where and not e.leaving]:
            name = engine.replica.name
            engine.leaving = True
            task = asyncio.ensure_future(self.router.leave(name, within_s=self.fleet.mesh.hosts.notice_s))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self._engine_lost(engine.replica, PeerDied(name, "lost", f"its host {where.name} is about to be taken away"))

    async def _watch_notices(self) -> None:
        while True:
            for host in self.fleet.hosts:
                self.notice(host.index, taken=Path(self.fleet.mesh.hosts.notice.format(host=host.index)).exists())
            await asyncio.sleep(0.5)

    def _engine_lost(self, replica: EngineReplica, error: FleetError) -> None:
        self._engines.failed(int(replica.name.removeprefix("rollout")), error)

    async def _bring_engine(self, index: int) -> None:
        assert self.router.launcher is not None
        replica, stats = await self.router.launcher.one(index)
        try:
            if self.weights is not None:
                await self.weights.welcome(replica, stats, self.deadline_s)
            else:
                self.router.admit(replica, stats)
                await self.router.join(replica.name, None)
        except BaseException:
            await replica.stop()
            raise

    def _puller_lost(self, replica: Replica) -> None:
        if replica.failure is not None:
            self._pullers.failed(replica.index, replica.failure)

    async def _bring_puller(self, index: int) -> None:
        assert self.weights is not None
        old = next(p for p in self.pullers if p.index == index)
        await old.stop()
        puller = await self.fleet.spawn("puller", index, PullerActor, self.fleet.token, f"puller{index}", host=old.host.index)
        await self.weights.replace_puller(puller, self.deadline_s)
        self.pullers[self.pullers.index(old)] = puller
        puller.on_failure(self._puller_lost)

    # ---- reward workers

    def _reward_lost(self, worker: Replica) -> None:
        if self.scorer is not None and worker.failure is not None:
            self.scorer.lost(worker, worker.failure)

    async def _bring_reward(self, index: int) -> None:
        from milkweed.environments.actor import RewardActor

        assert self.scorer is not None
        for old in [r for r in self.fleet.replicas if r.role == "reward" and r.index == index]:
            await old.stop()
        worker = await self.fleet.spawn("reward", index, RewardActor)
        worker.on_failure(self._reward_lost)
        self.scorer.join(worker)

    def _no_rewards(self, error: FleetError) -> None:
        if self.scorer is not None:
            self.scorer.end(error)
