"""Who waits for a worker that is gone: for the one that comes in its place, or to hear why none does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from milkweed.environments.items import Outcome, decode_items
from milkweed.environments.reward import Scorer
from milkweed.environments.workers import EnvironmentWorkers
from milkweed.environments.workshop import Done, encode_event
from milkweed.errors import EnvironmentFailed, FleetError, PeerDied
from milkweed.rollout.protocol import encode


class Worker:
    """A reward worker that answers 1.0 to everything, until it dies."""

    def __init__(self, index: int, dies: bool = False) -> None:
        self.name, self.failure, self.dies = f"reward{index}", None, dies
        self.out: list[int] = []

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        await asyncio.sleep(0.01)
        if self.dies:
            self.failure = PeerDied(self.name, "died", "killed by SIGKILL")
            raise self.failure
        if endpoint == "submit":
            self.out += [item.id for item in decode_items(args[0])]
            return None
        done, self.out = self.out, []
        return encode(([Outcome(id=i, reward=1.0) for i in done], {}))


def test_rewards_wait_for_the_worker_that_comes_in_place_of_the_last_one_or_hear_why_none_does():
    async def work() -> None:
        for ends in (False, True):
            scorer, lost = Scorer([Worker(0, dies=True)]), []
            scorer.on_lost = lambda worker, error, lost=lost: lost.append(worker.name)
            scores = [asyncio.create_task(scorer.score(float)) for _ in range(3)]
            while not lost:
                await asyncio.sleep(0.01)
            assert lost == ["reward0"] and not any(s.done() for s in scores)
            if ends:
                scorer.end(FleetError("reward0", "died", "it failed 5 times in a row"))
                assert all("5 times in a row" in str(e) for e in await asyncio.gather(*scores, return_exceptions=True))
            else:
                scorer.join(Worker(0))
                assert [s.reward for s in await asyncio.wait_for(asyncio.gather(*scores), 5)] == [1.0, 1.0, 1.0]
            await scorer.close()

    asyncio.run(asyncio.wait_for(work(), 20))


class Shop:
    """An environment worker that answers every trajectory, until it dies."""

    def __init__(self, index: int, dies: bool = False) -> None:
        self.name, self.index, self.dies, self.ids = f"environment{index}", index, dies, list[int]()
        self.host = SimpleNamespace(name="host0")

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        await asyncio.sleep(0.01)
        if self.dies:
            raise PeerDied(self.name, "died", "killed by SIGKILL")
        if endpoint == "push":
            self.ids += [command[1] for command in args[0] if command[0] == "run"]
            return None
        ids, self.ids = self.ids, []
        return [encode_event(Done(i, several=True)) for i in ids]


async def play(task: Any, policy: Any) -> Any:
    return []


def test_trajectories_wait_for_the_worker_that_comes_in_place_of_the_last_one_or_hear_why_none_does():
    async def work(ends: bool) -> None:
        workers, lost = EnvironmentWorkers([Shop(0, dies=True)]), list[str]()
        workers.on_lost = lambda worker, error: lost.append(worker.name)
        policy = SimpleNamespace(sampling=None)
        with pytest.raises(EnvironmentFailed, match="went with its worker"):
            await workers.run(play, None, policy)
        assert lost == ["environment0"]
        waits = asyncio.create_task(workers.run(play, None, policy))
        await asyncio.sleep(0.05)
        assert not waits.done()
        if ends:
            workers.end(FleetError("environment0", "died", "it failed 5 times in a row"))
            with pytest.raises(FleetError, match="5 times in a row"):
                await waits
        else:
            second = Shop(0)
            workers.join(second)
            await asyncio.sleep(0.05)
            assert workers._lanes[0].worker is second
            workers.lost(second, PeerDied("environment0", "died", "while it idled"))
            assert lost == ["environment0", "environment0"]
            waits.cancel()
        await asyncio.wait([waits])
        await workers.close()

    for ends in (False, True):
        asyncio.run(work(ends))
