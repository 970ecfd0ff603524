"""An engine that answers wrongly, or much more slowly than its peers, is found; what is well is left alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from test_router import V0, V1, FakeReplica

from milkweed.errors import FleetError
from milkweed.rollout.protocol import EngineReply
from milkweed.rollout.router import Router
from milkweed.runs import health as module
from milkweed.runs.health import FEWEST, PROBE, Health


class Scored(FakeReplica):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.sum, self.off, self.took = "good", 0.0, None
        sample = self.answer
        self.answer = lambda r: self.scored(r) if r.score is not None else sample(r)

    def scored(self, r: Any) -> EngineReply:
        assert r.token_ids == list(PROBE)
        return EngineReply(id=r.id, logprobs=[0.0] + [-1.0 - self.off] * (len(PROBE) - 1))

    async def checksum(self) -> dict[str, str]:
        if self.took is not None:
            self.stats.version = self.took
        return {"rank0": self.sum}


def looked(count: int, work: Any, **options: Any) -> None:
    async def run() -> None:
        replicas = [Scored(i) for i in range(count)]
        router = Router(replicas, [r.stats for r in replicas])
        lost: list[tuple[str, str, str]] = []
        router.on_lost = lambda replica, error: lost.append((replica.name, error.kind, error.cause))
        health = Health(router, lambda index: True, SimpleNamespace(**({"look_s": 0, "slower": 5} | options)))
        try:
            async with asyncio.timeout(10):
                await work(router, replicas, health, lost)
        finally:
            health.close()
            await router.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


def test_engines_that_agree_are_left_alone_and_one_alone_is_not_asked():
    async def work(router, replicas, health, lost):
        replicas[0].off = 0.01  # rounding
        for _ in range(3):
            await health.look()
        assert lost == []

    looked(3, work)

    async def alone(router, replicas, health, lost):
        replicas[0].sum = "whatever"
        await health.look()
        assert lost == [] and replicas[0].submits == []

    looked(1, alone)


@pytest.mark.parametrize("what", ["weights", "log-probs"])
def test_the_one_whose_weights_or_log_probs_differ_is_lost(what):
    async def work(router, replicas, health, lost):
        if what == "weights":
            replicas[1].sum = "a bit was flipped"
        else:
            replicas[1].off = 0.5
        await health.look()
        ((name, kind, cause),) = lost
        assert (name, kind) == ("rollout1", "wrong") and "rollout0, rollout2" in cause and what.split()[0] in cause
        await asyncio.sleep(0.02)
        assert replicas[1].stopped and sorted(router.versions()) == ["rollout0", "rollout2"]
        await health.look()
        assert len(lost) == 1

    looked(3, work)


def test_where_there_is_no_majority_none_is_trusted():
    async def work(router, replicas, health, lost):
        replicas[1].sum = "other"
        await health.look()
        assert sorted(name for name, *_ in lost) == ["rollout0", "rollout1"]

    looked(2, work)


def test_what_was_said_while_versions_changed_hands_is_asked_again():
    async def work(router, replicas, health, lost):
        replicas[1].sum, router.turns = "of another version", 1
        look = asyncio.create_task(health.look())
        await asyncio.sleep(0.05)
        replicas[1].sum, router.turns = "good", 2
        await look
        assert lost == []

    looked(2, work)


def test_engines_of_different_versions_or_that_change_theirs_meanwhile_are_not_compared():
    async def work(router, replicas, health, lost):
        replicas[1].sum, replicas[1].stats.version = "that of V1", V1
        for e in router.crew:
            e.stats.version = e.replica.stats.version
        await health.look()
        replicas[1].stats.version = V0
        router.crew.engines[1].stats = replicas[1].stats
        replicas[1].took = V1
        await health.look()
        assert lost == []

    looked(2, work)


def test_an_engine_much_slower_than_its_peers_in_two_looks_on_end_is_lost():
    async def work(router, replicas, health, lost):
        def paced(*paces: float) -> None:
            for engine, pace in zip(router.crew, paces):
                engine.paces.extend([pace] * FEWEST)

        paced(0.01, 0.06, 0.01)
        await health.look()
        paced(0.01, 0.02, 0.01)
        await health.look()
        assert lost == [], "it was a moment's"
        for _ in range(2):
            paced(0.01, 0.06, 0.01)
            await health.look()
        ((name, kind, cause),) = lost
        assert (name, kind) == ("rollout1", "slow") and "0.06 s a token, its peers 0.01" in cause

    looked(3, work)


def test_the_router_measures_the_pace_of_fresh_tokens():
    async def work(router, replicas, health, lost):
        replicas[0].gate.clear()
        task = asyncio.create_task(router.sample([1, 2, 3, 4]))
        await asyncio.sleep(0.2)
        replicas[0].gate.set()
        await task
        (pace,) = router.crew.engines[0].paces
        assert 0.05 <= pace < 0.2

    looked(1, work)


def test_a_probe_that_its_engine_fails_under_is_no_answer_of_another():
    async def work(router, replicas, health, lost):
        replicas[0].gate.clear()
        asked = asyncio.create_task(router.ask_one(router.crew.engines[0], PROBE, name="probe", deadline_s=5))
        await asyncio.sleep(0.02)
        replicas[0].die()
        with pytest.raises(FleetError, match="failed under probe"):
            await asked

    looked(2, work)
