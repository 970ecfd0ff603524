"""Supervision on virtual time: replacing, back-off, budgets, engines that come, stand by and leave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from test_router import V0, V1, FakeReplica, staged

from milkweed.config import FaultsConfig
from milkweed.config.mesh import EngineConfig
from milkweed.errors import ConfigError, DataError, FleetError, PeerDied, RemoteError, TransferError
from milkweed.fleet.supervision import Event, Supervisor, kind_of, recycles
from milkweed.rollout.protocol import CommitReport, EngineStats
from milkweed.rollout.router import Router
from milkweed.runs.scaling import Scaling
from milkweed.runs.upkeep import Upkeep
from milkweed.runs.virtual_time import run_virtual


def died(index: int = 0) -> PeerDied:
    return PeerDied(f"rollout{index}", "died", "killed by SIGKILL; last line: out of luck")


class Rig:
    """A supervisor whose replicas take 30 s to start, or fail as `script` says."""

    def __init__(self, *script: Exception | None, budget: FaultsConfig = FaultsConfig()) -> None:
        self.script, self.starts = list(script), list[float]()
        self.ends, self.events = list[FleetError](), list[Event]()
        self.supervisor = Supervisor("rollout", self.bring, ended=self.ends.append, note=self.events.append, budget=budget)
        self.supervisor.serving(0)

    async def bring(self, index: int) -> None:
        self.starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(30)
        if self.script and (error := self.script.pop(0)) is not None:
            raise error

    async def until(self, state: str) -> None:
        while self.supervisor.places[0].state != state:
            await asyncio.sleep(0.25)


def test_a_replica_that_failed_is_replaced_at_once_and_told_of_once():
    async def work() -> None:
        rig = Rig()
        rig.supervisor.failed(0, died())
        rig.supervisor.failed(0, died())
        await rig.until("serving")
        assert rig.starts == [0.0]
        assert [(e.what, e.kind) for e in rig.events] == [("failed", "died"), ("replaced", "died")]
        assert rig.events[1].after_s == 30 and "out of luck" in rig.events[0].cause

    run_virtual(work())


def test_a_fault_that_repeats_is_tried_ever_more_rarely_and_ends_the_run_with_its_cause():
    async def work() -> None:
        rig = Rig(*[died()] * 9, budget=FaultsConfig(retries=3))
        rig.supervisor.failed(0, died())
        await rig.until("given up")
        assert rig.starts == [0.0, 31.0, 63.0], "no rest, 1 s, 2 s, each after a start of 30 s"
        assert len(rig.ends) == 1 and "4 times in a row" in str(rig.ends[0]) and "out of luck" in str(rig.ends[0])
        rig.supervisor.failed(0, died())
        await asyncio.sleep(100)
        assert len(rig.starts) == 3

    run_virtual(work())


def test_a_replica_that_served_for_long_has_a_fresh_budget():
    async def work() -> None:
        rig = Rig(budget=FaultsConfig(retries=1))
        for _ in range(10):
            await asyncio.sleep(61)
            rig.supervisor.failed(0, died())
            await rig.until("serving")
        assert rig.ends == [] and len(rig.starts) == 10

    run_virtual(work())


def test_what_no_further_attempt_can_mend_is_not_attempted_again():
    async def work() -> None:
        rig = Rig(ConfigError("rollout.engine: no such key"))
        rig.supervisor.failed(0, died())
        await rig.until("given up")
        assert len(rig.starts) == 1 and "no such key" in str(rig.ends[0])

    run_virtual(work())


def test_a_place_without_a_host_waits_says_so_once_and_goes_on_when_there_is_one():
    async def work() -> None:
        nowhere = PeerDied("rollout0", "lost", "there is no other host for it")
        rig = Rig(*[nowhere] * 20, budget=FaultsConfig(retries=2))
        rig.supervisor.failed(0, died())
        await rig.until("serving")
        assert len(rig.starts) == 21 and rig.ends == []
        assert [e.what for e in rig.events] == ["failed", "waiting", "replaced"]

    run_virtual(work())


def test_a_users_exception_is_told_from_a_failure():
    assert not recycles(RemoteError("reward0", "raised", "ValueError")) and not recycles(DataError("no"))
    assert recycles(died()) and kind_of(died()) == "died" and kind_of(TransferError("x")) == "transfer"


def crew(count: int, work: Any, **options: Any) -> None:
    async def run() -> None:
        replicas = [FakeReplica(i) for i in range(count)]
        router = Router(replicas, [r.stats for r in replicas], **options)
        router.lost = []  # type: ignore[attr-defined]
        router.on_lost = lambda replica, error: router.lost.append(replica.name)  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(10):
                await work(router, replicas)
        finally:
            await router.close()

    asyncio.run(run())


def test_samples_wait_for_the_engine_that_comes_in_place_of_the_last_one():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        replicas[0].gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(5)]
        await asyncio.sleep(0.02)
        replicas[0].die()
        await asyncio.sleep(0.02)
        assert router.lost == ["rollout0"] and not any(t.done() for t in tasks)
        new = FakeReplica(0)
        new.commits = [CommitReport(ok=True, state="serving", version=V1)]
        router.version = V1
        router.admit(new, new.stats)
        await asyncio.sleep(0.02)
        assert new.submits == [], "nothing is served before the weights are there"
        await router.join("rollout0", staged(V1)["host0"])
        done = await asyncio.gather(*tasks)
        assert [c.token_ids for c in done] == [[i] for i in range(5)] and {c.version for c in done} == {V1}

    crew(1, work)


def test_an_update_that_finds_no_engine_alive_is_for_those_that_come():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        replicas[0].die()
        await asyncio.sleep(0.02)
        report = await router.update_weights(staged(V1), V1)
        assert router.version == V1 and report.engines == {}
        router.admit(FakeReplica(0), FakeReplica(0).stats)
        with pytest.raises(TransferError, match="serves 0.0, the others 0.1"):
            await router.join("rollout0", None)

    crew(1, work)


def test_when_no_engine_will_come_whoever_waits_is_told_why():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        replicas[0].die()
        await asyncio.sleep(0.02)
        task = asyncio.create_task(router.sample([1]))
        await asyncio.sleep(0.02)
        router.end(FleetError("rollout0", "died", "it failed 5 times in a row, the last: out of memory"))
        for answer in (task, router.sample([2])):
            with pytest.raises(FleetError, match="5 times in a row, the last: out of memory"):
                await answer

    crew(1, work)


def test_an_engine_that_stands_by_steps_in_at_once():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        assert {(await router.sample([i])).engine for i in range(6)} == {"rollout0"}
        replicas[0].gate.clear()
        task = asyncio.create_task(router.sample([7]))
        await asyncio.sleep(0.02)
        replicas[0].die()
        assert (await task).engine == "rollout1"
        new = FakeReplica(0)
        router.admit(new, new.stats)
        await router.join("rollout0", None)
        assert {(await router.sample([i])).engine for i in range(6)} == {"rollout1"}, "the new one stands by"

    crew(2, work, standby=1)


def test_an_engine_that_leaves_finishes_what_it_has_or_hands_it_over():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(8)]
        await asyncio.sleep(0.02)
        assert router.load["rollout0"] == 4
        leaving = asyncio.create_task(router.leave("rollout0", within_s=0.2))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(router.sample([9]))
        replicas[1].gate.set()
        assert (await late).engine == "rollout1"
        await leaving
        done = await asyncio.gather(*tasks)
        assert {c.engine for c in done} == {"rollout1"} and replicas[0].stopped and list(router.load) == ["rollout1", ""]
        assert router.lost == [], "it was no failure"
        again = asyncio.create_task(router.leave("rollout1", within_s=5))
        await again
        assert V0 == router.version

    crew(2, work)


class Hosts:
    """What `Upkeep` needs of a fleet: two hosts, engines 0 and 1 on them, and starts that take a moment."""

    def __init__(self) -> None:
        self.hosts = [SimpleNamespace(name=f"host{i}", index=i, leaving=False, noticed=False, lost=None) for i in range(2)]
        rollout = EngineConfig(look_s=0)
        self.mesh = SimpleNamespace(hosts=SimpleNamespace(notice="", notice_s=1.0), rollout=rollout, device="cpu")
        self.on_notice: Any = None
        self.replicas: list[FakeReplica] = []

    async def one(self, index: int) -> tuple[FakeReplica, EngineStats]:
        where = next((h for h in [self.hosts[index % 2], *self.hosts] if not h.leaving), None)
        if where is None:
            raise PeerDied(f"rollout{index}", "lost", "there is no other host for it")
        await asyncio.sleep(0.05)
        replica = FakeReplica(index)
        replica.host = where
        self.replicas.append(replica)
        return replica, replica.stats


def kept(count: int, work: Any) -> None:
    async def run() -> None:
        fleet, replicas = Hosts(), [FakeReplica(i) for i in range(count)]
        for r in replicas:
            r.host = fleet.hosts[int(r.name[-1])]
        router = Router(replicas, [r.stats for r in replicas])
        router.launcher = fleet  # type: ignore[assignment]
        events: list[Event] = []
        upkeep = Upkeep(fleet, router, [], None, None, note=events.append)  # type: ignore[arg-type]
        fleet.replicas = replicas
        try:
            async with asyncio.timeout(10):
                await work(router, fleet, upkeep, events)
        finally:
            await upkeep.close()
            await router.close()

    asyncio.run(run())


def test_one_engine_becomes_three_and_one_again_and_nothing_is_lost():
    async def work(router: Router, fleet: Hosts, upkeep: Upkeep, events: list[Event]) -> None:
        fleet.replicas[0].gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(6)]
        await router.scale(3)
        assert sorted(router.versions()) == ["rollout0", "rollout1", "rollout2"]
        done = await asyncio.gather(*(router.sample([i]) for i in range(8)))
        assert {c.engine for c in done} == {"rollout1", "rollout2"}, "the first has more than they"
        late = [asyncio.create_task(router.sample([i])) for i in range(10, 20)]
        await asyncio.sleep(0)
        await router.scale(1, within_s=1)
        fleet.replicas[0].gate.set()
        assert [(await t).token_ids for t in tasks + late] == [[i] for i in [*range(6), *range(10, 20)]]
        assert list(router.versions()) == ["rollout0"] and [r.stopped for r in fleet.replicas] == [False, True, True]
        assert not [e for e in events if e.what == "failed"]
        with pytest.raises(ConfigError, match="at least 1"):
            await router.scale(0)

    kept(1, work)


def test_engines_follow_what_is_at_hand_within_their_limits():
    class Queue:
        """A router whose engines take 15 s to start, beside a queue that the test sets."""

        def __init__(self) -> None:
            self.crew, self.load, self.changes = SimpleNamespace(wanted=1), {"rollout0": 0, "": 0}, list[tuple[float, int]]()
            self.fails = False

        async def scale(self, engines: int) -> None:
            await asyncio.sleep(15)
            if self.fails:
                raise PeerDied("rollout1", "died", "out of luck")
            self.crew.wanted = engines
            self.changes.append((asyncio.get_running_loop().time(), engines))

    async def work() -> None:
        router, said = Queue(), list[str]()
        scaling = Scaling(router, EngineConfig(max_replicas=3, target_requests=10, upscale_delay_s=30, downscale_delay_s=120), said.append)  # type: ignore[arg-type]
        for second in range(200):  # steps of 10 s: in half of each 16 samples are at hand, 8 on the average
            router.load[""] = 16 if second % 10 < 5 else 0
            await asyncio.sleep(1)
        assert not router.changes and not said, "one is enough"
        router.load = {"rollout0": 20, "": 70}
        await asyncio.sleep(100)
        assert [n for _, n in router.changes] == [2, 3] and router.changes[0][0] <= 200 + 30 + 15
        assert said[0].startswith("1 -> 2 engines: ") and "over 30 s, and 10 are an engine's share" in said[0]
        router.load = {"rollout0": 12, "": 0}
        await asyncio.sleep(100)
        assert len(router.changes) == 2, "not yet"
        await asyncio.sleep(150)
        assert [n for _, n in router.changes] == [2, 3, 2]
        router.load, router.fails = {"rollout0": 100, "": 0}, True
        await asyncio.sleep(60)
        assert any("2 -> 3 engines failed: rollout1 died" in words for words in said)
        scaling.close()
        count = len(said)
        await asyncio.sleep(300)
        assert len(said) == count

    run_virtual(work())


def test_engines_of_a_host_that_is_taken_away_hand_over_to_others():
    async def work(router: Router, fleet: Hosts, upkeep: Upkeep, events: list[Event]) -> None:
        first = fleet.replicas[0]
        first.gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(6)]
        await asyncio.sleep(0.02)
        assert first.held
        upkeep.notice(0)
        done = await asyncio.gather(*tasks)
        assert [c.token_ids for c in done] == [[i] for i in range(6)], "what it could not finish in time was done elsewhere"
        while "rollout0" not in router.versions() or not first.stopped:
            await asyncio.sleep(0.02)
        assert fleet.replicas[-1].host.index == 1 and events[-1].what == "replaced"
        upkeep.notice(1)
        while not any(e.what == "waiting" for e in events):
            await asyncio.sleep(0.02)
        waiting = asyncio.create_task(router.sample([7]))
        upkeep.notice(0, taken=False)
        assert (await waiting).token_ids == [7]

    kept(2, work)


def test_a_fault_that_goes_round_the_places_of_a_role_ends_the_run():
    async def work() -> None:
        ends: list[FleetError] = []

        async def bring(index: int) -> None:
            await asyncio.sleep(1)

        supervisor = Supervisor("reward", bring, ended=ends.append, budget=FaultsConfig(retries=9, role_retries=3))
        for index in range(2):
            supervisor.serving(index)
        for n in range(8):
            supervisor.failed(n % 2, PeerDied(f"reward{n % 2}", "died", "out of luck"))
            await asyncio.sleep(5)
        assert len(ends) == 1 and "the last of 8 failures of role reward in 300 s" in str(ends[0])
        # spread over more time the same number is none
        supervisor, ends[:] = Supervisor("reward", bring, ended=ends.append, budget=FaultsConfig(retries=99, role_retries=3)), []
        supervisor.serving(0)
        for _ in range(30):
            supervisor.failed(0, PeerDied("reward0", "died", "out of luck"))
            await asyncio.sleep(70)
        assert not ends

    run_virtual(work())


def test_a_host_whose_replicas_fail_again_and_again_is_used_no_more_where_there_is_another():
    async def work(router: Router, fleet: Hosts, upkeep: Upkeep, events: list[Event]) -> None:
        supervisor = upkeep._engines
        for _ in range(supervisor.budget.host_retries + 1):
            engine = next(e for e in router.crew.living if e.replica.index == 0)
            assert not fleet.hosts[0].leaving and engine.replica.host is fleet.hosts[0]
            supervisor.places[0].failures = 0  # the place's own budget is another matter
            router.lose(engine, PeerDied("rollout0", "died", "out of luck"))
            while supervisor.places[0].state != "serving":
                await asyncio.sleep(0.02)
        assert fleet.hosts[0].leaving and not fleet.hosts[1].leaving
        assert [e.replica for e in events if e.what == "given up"] == ["host0"]
        assert {e.replica.host.name for e in router.crew.living} == {"host1"}
        for _ in range(supervisor.budget.host_retries + 2):  # nowhere else to go: it is used on
            supervisor._failures.count("host1", asyncio.get_running_loop().time(), 300)
        upkeep._shun("host1")
        assert not fleet.hosts[1].leaving

    kept(2, work)


def test_a_signal_to_a_host_moves_its_engines_as_the_file_does():
    async def work(router: Router, fleet: Hosts, upkeep: Upkeep, events: list[Event]) -> None:
        host = fleet.hosts[0]
        host.noticed = True
        fleet.on_notice(host)
        while "rollout0" not in router.versions() or router.crew.find("rollout0").replica.host is host:
            await asyncio.sleep(0.02)
        assert host.leaving and any("about to be taken away" in e.cause for e in events)

    kept(2, work)


def test_a_teacher_that_dies_is_replaced():
    async def run() -> None:
        fleet, replicas, teachers = Hosts(), [FakeReplica(0)], [FakeReplica(0)]
        for r in [*replicas, *teachers]:
            r.host = fleet.hosts[0]
        router, teacher = Router(replicas, [replicas[0].stats]), Router(teachers, [teachers[0].stats])
        router.launcher = teacher.launcher = fleet  # type: ignore[assignment]
        fleet.replicas, events = [], list[Event]()
        upkeep = Upkeep(fleet, router, [], None, None, note=events.append, teacher=teacher)  # type: ignore[arg-type]
        teachers[0].gate.clear()
        score = asyncio.create_task(teacher.score([1, 2], 0, name="row"))
        await asyncio.sleep(0.02)
        teachers[0].die()
        async with asyncio.timeout(10):
            await score
        assert [(e.replica, e.what) for e in events] == [("teacher0", "failed"), ("teacher0", "replaced")]
        assert list(router.versions()) == ["rollout0"]
        for part in (upkeep, router, teacher):
            await part.close()

    asyncio.run(run())
