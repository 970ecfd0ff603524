"""Environments in worker processes: the same trajectories as in the controller, and what one that goes wrong costs."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from chat_support import Scripted, chat_like

import milkweed as mw
from milkweed.environments import sandbox
from milkweed.environments.reward import Scorer
from milkweed.environments.workers import EnvironmentWorkers
from milkweed.environments.workshop import WorkshopLimits
from milkweed.errors import EnvironmentFailed, FleetError
from milkweed.runs.sampling import drops, sample_groups
from milkweed.types import Prompt, Sampling

SAMPLING = Sampling(max_tokens=64)


def double(x: int) -> int:
    """Doubles."""
    return 2 * x


def right(prompt, completion):
    return float(completion == "42")


async def two_players(task, policy):
    a, b = policy.talk(task.messages, agent="a"), policy.talk([{"role": "user", "content": "you"}], agent="b")
    await a.reply()
    await b.reply()
    return [a.trajectory(1.0), b.trajectory(-1.0)]


async def where(task, policy):
    await policy.chat(task.messages)
    return policy.trajectory(float(os.readlink("/proc/self")))  # its own namespace numbers it otherwise


class Game:
    def reset(self, task):
        return "first"

    def step(self, action):
        return "second", 0.5, action == "done"


async def ill(task, policy):
    """Does what its task says."""
    talk = policy.talk(task.messages)
    await talk.reply()
    kind = task.info["kind"]
    if kind == "die":
        os.kill(os.getpid(), 9)
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(3600)
    if kind == "leak":
        held = []
        while True:
            held.append(b"x" * (64 << 20))
            await asyncio.sleep(0.02)
    if kind == "flood":
        for _ in range(1024):
            print("x" * (1 << 20))
            await asyncio.sleep(0)
    if kind == "raise":
        raise KeyError("nothing here")
    if kind == "own fault":
        raise EnvironmentFailed("the sea is rough")
    if kind == "late":
        await asyncio.sleep(3600)
    return talk.trajectory(1.0)


def sample(tmp_path, env, prompts, lines, *, count=1, limits=None, scorer=None, **options):
    """Groups of one sample each, made in `count` workers."""
    chat = chat_like("qwen3", tmp_path / "q")

    async def work():
        workers = EnvironmentWorkers.local(count, chat, limits)
        try:
            return await sample_groups(
                env, prompts, Scripted(chat, lines), chat=chat, workers=workers, scorer=scorer, samples=1,
                sampling=SAMPLING, key="1", **options,
            )  # fmt: skip
        finally:
            await workers.close()
            if scorer is not None:
                await scorer.close()

    before = set(sandbox.descendants(os.getpid()))
    groups = asyncio.run(work())
    assert set(sandbox.descendants(os.getpid())) <= before, "no process is left"
    return groups


def tasks(*contents, **info):
    return [Prompt(id=str(i), messages=[{"role": "user", "content": c}], info=info) for i, c in enumerate(contents)]


def test_a_trajectory_is_the_same_as_in_the_controller_and_rewards_go_to_reward_workers(tmp_path):
    def lines(text):
        return "42" if "<tool_response>" in text else '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'

    env = mw.tool_use(right, [double])
    (there,) = sample(tmp_path, env, tasks("21?"), lines, scorer=(scorer := Scorer.local(1)))
    chat = chat_like("qwen3", tmp_path / "q")
    here = asyncio.run(
        sample_groups(env, tasks("21?"), Scripted(chat, lines), chat=chat, samples=1, sampling=SAMPLING, key="1")
    )[0]
    (a,), (b,) = there.trajectories, here.trajectories
    assert a.reward == 1.0 and a.reward_parts["tool_calls"] == 1.0 and a == b and a.dropped is None
    assert scorer.calls > 0


def test_players_gyms_and_chat_work_in_another_process(tmp_path):
    groups = sample(tmp_path, two_players, tasks("go"), lambda text: "hello")
    assert {g.id.split("#")[1]: g.rewards for g in groups} == {"a": [1.0], "b": [-1.0]}
    (game,) = sample(tmp_path, Game, tasks("go"), lambda text: "done" if "second" in text else "on")
    assert game.rewards == [1.0]
    groups = sample(tmp_path, where, tasks(*"abcd"), lambda text: "x", count=2)
    pids = {r for g in groups for r in g.rewards}
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("die", "SIGKILL"), ("hang", "stood still"), ("leak", "took more than"), ("flood", "printed more than")],
)
def test_a_process_that_goes_wrong_takes_only_what_is_in_it_and_that_is_made_again(tmp_path, kind, reason):
    limits = WorkshopLimits(hang_s=3.0, memory_bytes=700 << 20, output_bytes=16 << 20)
    prompts = tasks(*"abcdef", kind="well")
    prompts[2] = Prompt(id="ill", messages=prompts[2].messages, info={"kind": kind})
    groups = sample(tmp_path, ill, prompts, lambda text: "x", limits=limits, deadline_s=90.0)
    for g in groups:
        (t,) = g.trajectories
        if g.prompt.id == "ill":
            assert t.reward is None and reason in t.dropped and t.dropped.startswith("EnvironmentFailed"), t.dropped
        else:
            assert t.reward == 1.0, t.dropped


def test_what_an_environment_raises_is_told_apart_and_its_deadline_holds(tmp_path):
    prompts = [
        Prompt(id=k, messages=[{"role": "user", "content": k}], info={"kind": k})
        for k in ("raise", "own fault", "late", "well")
    ]
    groups = sample(tmp_path, ill, prompts, lambda text: "x", deadline_s=8.0)
    told = {g.prompt.id: g.trajectories[0].dropped for g in groups}
    assert told["well"] is None
    assert told["raise"].startswith("environment raised KeyError: 'nothing here' (ill, line"), told
    assert told["own fault"] == "EnvironmentFailed: the sea is rough"
    assert "deadline of 8 s" in told["late"] and len(drops(groups)) == 3


def test_a_lost_fleet_ends_the_sampling_and_an_environment_that_cannot_travel_says_so(tmp_path):
    def lines(text):
        raise FleetError("rollout", "lost", "no engine is left")

    with pytest.raises(FleetError, match="no engine is left"):
        sample(tmp_path, where, tasks("a"), lines)
    lock = __import__("threading").Lock()

    async def holds(task, policy):
        return lock

    (group,) = sample(tmp_path, holds, tasks("a"), lambda text: "x")
    assert "cannot be sent to a worker process" in group.trajectories[0].dropped
