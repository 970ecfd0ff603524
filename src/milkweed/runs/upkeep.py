"""What keeps a live mesh whole: engines, pullers and workers that fail are replaced; engines come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkweed.config import FaultsConfig
from milkweed.errors import ConfigError, FleetError, PeerDied
from milkweed.fleet.supervision import Event, Failures, Supervisor
from milkweed.runs.health import Health
from milkweed.runs.scaling import Scaling
from milkweed.transfer.puller_actor import PullerActor

if TYPE_CHECKING:
    from milkweed.environments import Scorer
    from milkweed.environments.workers import EnvironmentWorkers
    from milkweed.fleet import Fleet, Replica
    from milkweed.fleet.host import Host
    from milkweed.rollout import Router
    from milkweed.rollout.records import Engine, EngineReplica
    from milkweed.runs.weights import WeightPlane


class Upkeep:
    """Of one mesh. `weights` is None where there is no trainer."""

    def __init__(
        self, fleet: Fleet, router: Router, pullers: list[Replica], weights: WeightPlane | None, scorer: Scorer | None, *,
        note: Callable[[Event], None], budget: FaultsConfig = FaultsConfig(), deadline_s: float = 120.0,
        teacher: Router | None = None, environment: EnvironmentWorkers | None = None, environment_setup: bytes = b"",
    ) -> None:  # fmt: skip
        self.fleet, self.router, self.pullers, self.weights, self.deadline_s = fleet, router, pullers, weights, deadline_s
        self.scorer, self.environment, self._setup, self._note = scorer, environment, environment_setup, note
        failures = Failures()

        def supervisor(role: str, bring: Callable[[int], Any], ended: Callable[[FleetError], None]) -> Supervisor:
            return Supervisor(role, bring, ended=ended, note=note, budget=budget, failures=failures, shun=self._shun)

        self._engines = supervisor("rollout", lambda index: self._bring_engine(router, index), router.end)
        self._prefills = supervisor("prefill", lambda index: self._bring_engine(router, index, "prefill"), router.end)
        self._pullers = supervisor("puller", self._bring_puller, router.end)
        self._rewards = supervisor("reward", self._bring_reward, self._no_rewards)
        self._environments = supervisor("environment", self._bring_environment, self._no_environments)
        self._supervisors = [self._engines, self._prefills, self._pullers, self._rewards, self._environments]
        self._keep(router, self._engines, self._prefills)
        if teacher is not None:
            teachers = supervisor("teacher", lambda index: self._bring_engine(teacher, index), teacher.end)
            self._supervisors.append(teachers)
            self._keep(teacher, teachers, teachers)
        for puller in pullers:
            self._pullers.serving(puller.index)
            puller.on_failure(self._puller_lost)
        for role, of, workers, lost in (
            ("reward", self._rewards, scorer, self._reward_lost),
            ("environment", self._environments, environment, self._environment_lost),
        ):
            here = [r for r in fleet.replicas if r.role == role]
            for worker in here:
                of.serving(worker.index)
                worker.on_failure(lost)
            if workers is not None and here:
                workers.on_lost = lambda worker, error, of=of: of.failed(worker.index, error, worker.host.name)
        self._leaving: set[asyncio.Task[None]] = set()
        self._shunned: set[int] = set()
        loop = asyncio.get_running_loop()

        def heard(host: Host) -> None:
            loop.call_soon_threadsafe(self.notice, host.index)

        fleet.on_notice = heard
        self._notices = asyncio.ensure_future(self._watch_notices()) if fleet.mesh.hosts.notice else None
        self.health = Health(router, lambda engine: engine.replica.index in self._of(engine).places, fleet.mesh.rollout)
        router.scaling = self.scale
        self.scaling = Scaling(router, fleet.mesh.rollout, lambda why: note(Event("rollout", "scaled", cause=why)))

    def _keep(self, router: Router, engines: Supervisor, prefills: Supervisor) -> None:
        for engine in router.crew:
            (prefills if engine.prefills else engines).serving(engine.replica.index)

        def lost(replica: EngineReplica, error: FleetError) -> None:
            of = prefills if replica.name == f"prefill{replica.index}" else engines
            of.failed(replica.index, error, replica.host.name)

        router.on_lost = lost

    def _of(self, engine: Engine) -> Supervisor:
        return self._prefills if engine.prefills else self._engines

    async def scale(self, engines: int, *, within_s: float = 30.0) -> None:
        """Let `engines` serve. More are started, and serve once they have the weights; the last ones leave, finishing what
        they have within `within_s`, after which others do it. Raises what kept a new one from serving."""
        if engines < 1:
            raise ConfigError(f"rollout.scale({engines}): at least 1 engine must serve")
        c = self.fleet.mesh.rollout
        if self.fleet.mesh.device != "cpu" and engines > (most := max(c.replicas, c.max_replicas)):
            raise ConfigError(f"rollout.scale({engines}): the mesh keeps GPUs for {most} engines; raise rollout.max_replicas in its file")
        standby = c.standby
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
        self.health.close()
        self.scaling.close()
        self.fleet.on_notice = lambda host: None
        for task in [*self._leaving, *([self._notices] if self._notices else [])]:
            task.cancel()
        for supervisor in self._supervisors:
            await supervisor.close()

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
            lost = PeerDied(name, "lost", f"its host {where.name} is about to be taken away")
            self._of(engine).failed(engine.replica.index, lost)

    async def _watch_notices(self) -> None:
        while True:
            for host in self.fleet.hosts:
                named = Path(self.fleet.mesh.hosts.notice.format(host=host.index)).exists()
                self.notice(host.index, taken=named or host.noticed or host.index in self._shunned)
            await asyncio.sleep(0.5)

    def _shun(self, name: str) -> None:
        """That host has had too many failures: it is used no more, where others are that can take its replicas."""
        host = next((h for h in self.fleet.hosts if h.name == name), None)
        others = [h for h in self.fleet.hosts if h is not host and not h.leaving and not h.lost]
        if host is None or host.leaving or not others or self.fleet.mesh.device != "cpu":
            return
        self._shunned.add(host.index)
        self._note(Event(host.name, "given up", "refused", "too many of its replicas have failed; others take its place"))
        self.notice(host.index)

    async def _bring_engine(self, router: Router, index: int, role: str = "") -> None:
        assert router.launcher is not None
        replica, stats = await router.launcher.one(index, **({"role": role} if role else {}))
        try:
            if self.weights is not None and router is self.router:
                await self.weights.welcome(replica, stats, self.deadline_s)
            else:
                router.admit(replica, stats)
                await router.join(replica.name, None)
        except BaseException:
            await replica.stop()
            raise

    def _puller_lost(self, replica: Replica) -> None:
        if replica.failure is not None:
            self._pullers.failed(replica.index, replica.failure, replica.host.name)

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

    # ---- environment workers

    def _environment_lost(self, worker: Replica) -> None:
        if self.environment is not None and worker.failure is not None:
            self.environment.lost(worker, worker.failure)

    async def _bring_environment(self, index: int) -> None:
        from milkweed.environments.actor import EnvironmentActor

        assert self.environment is not None
        for old in [r for r in self.fleet.replicas if r.role == "environment" and r.index == index]:
            await old.stop()
        worker = await self.fleet.spawn("environment", index, EnvironmentActor, self._setup)
        worker.on_failure(self._environment_lost)
        self.environment.join(worker)

    def _no_environments(self, error: FleetError) -> None:
        if self.environment is not None:
            self.environment.end(error)
