"""Groups: identity, drops with their reason, and failures that do not spread."""

import asyncio

import pytest

from milkweed.errors import DataError, PeerDied
from milkweed.runs.sampling import drops, sample_groups
from milkweed.types import Completion, PolicyVersion, Prompt, Sampling, VersionSpan


class FakeRouter:
    """Answers at once; stands for the router in tests of the code around it."""

    def __init__(self):
        self.names = []

    async def sample(self, token_ids, sampling, *, name):
        self.names.append(name)
        span = VersionSpan(0, 2, PolicyVersion(0, 3))
        return Completion(prompt_ids=list(token_ids), token_ids=[7, 8], logprobs=[-0.5, -0.5], finish_reason="stop", versions=[span], sampling=sampling, text="ok")


PROMPTS = [Prompt(id=f"p{i}", messages=[{"role": "user", "content": str(i)}], token_ids=[1, 2]) for i in range(3)]


def collect(env, **kw):
    router = FakeRouter()
    groups = asyncio.run(sample_groups(env, PROMPTS, router, samples=2, sampling=Sampling(), key="5", **kw))
    return groups, router


async def scored(task, policy):
    return (await policy.sample(task.token_ids)).trajectory(reward=1.0)


def test_every_trajectory_knows_its_prompt_group_index_version_and_seed():
    groups, router = collect(scored)
    assert [g.id for g in groups] == ["5/p0", "5/p1", "5/p2"]
    t = groups[1].trajectories[1]
    assert (t.id, t.prompt_id, t.group_id, t.index, t.version) == ("5/p1/1", "p1", "5/p1", 1, PolicyVersion(0, 3))
    assert len({t.seed for g in groups for t in g.trajectories}) == 6
    assert router.names == [f"5/p{p}/{i}" for p in range(3) for i in range(2)], "an error says whose sample it was"


def test_an_environment_that_raises_drops_its_own_trajectory_with_the_reason():
    async def env(task, policy):
        if task.id == "p1":
            raise KeyError("answer")
        return await scored(task, policy)

    groups, _ = collect(env)
    assert [len(g.scored) for g in groups] == [2, 0, 2]
    assert "environment raised KeyError" in groups[1].trajectories[0].dropped and "p1" in groups[1].trajectories[0].dropped
    assert drops(groups) == {"environment raised KeyError": 2}


def test_an_environment_that_never_returns_is_dropped_at_its_deadline():
    async def env(task, policy):
        if task.id == "p0":
            await asyncio.sleep(60)
        return await scored(task, policy)

    groups, _ = collect(env, deadline_s=0.2)
    assert [len(g.scored) for g in groups] == [0, 2, 2] and "deadline" in groups[0].trajectories[0].dropped


def test_a_prompt_that_does_not_fit_is_dropped_but_a_lost_fleet_is_raised():
    async def too_long(task, policy):
        raise DataError("prompt p has 9 tokens, context 8")

    groups, _ = collect(too_long)
    assert not any(g.scored for g in groups)

    async def lost(task, policy):
        raise PeerDied("rollout0", "died", "gone")

    with pytest.raises(PeerDied, match="rollout0"):
        collect(lost)
