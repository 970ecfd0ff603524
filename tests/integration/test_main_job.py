"""The main job on the real stack: what engines serve is what the trainer holds, failures stay small, runs resume."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from pathlib import Path

import pytest
from listening import listeners

import milkweed as mw
from milkweed.errors import ConfigError, DataError, RunLocked
from milkweed.fleet import processes

pytestmark = pytest.mark.stack
SAMPLING = mw.Sampling(max_tokens=6)
SECRET = "MILKWEED_TESTS_TOKEN"
TRAINER = mw.TrainerConfig(lr=1e-3, seq_len=128, micro_rows=16)


def config(folder: Path, **changes) -> mw.RunConfig:
    return mw.RunConfig(**{"run_dir": str(folder), "steps": 50, "sampling": SAMPLING, "trainer": TRAINER, "samples_logged": 0} | changes)


def tasks() -> mw.Split:
    return mw.split(mw.arithmetic(digits=1, question="{a}+{b}="), held_out=0.2)


def parity(prompt, completion):
    """Something that a random model gets right half of the time."""
    return float(len(completion) % 2)


def praise(prompt, completion):
    return 1.0


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return mw.new_qwen3(tmp_path_factory.mktemp("model"), hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)


@pytest.fixture(scope="module")
def live(loop, model, tmp_path_factory):
    """One run, shared by the tests of this module; each leaves it whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "known to the controller")
        run = loop.run(mw.Run.open(config(tmp_path_factory.mktemp("runs") / "run"), model=model))
    yield run
    loop.run(run.close())


async def step(run, env=None, n=8, prompts=4):
    groups = await run.sample(env or mw.single_turn(parity), run.stream(tasks().train).take(prompts), n=n)
    batch = mw.batch(groups, mw.algorithms.grpo)
    await run.train(batch, mw.algorithms.grpo_loss())
    return groups, await run.publish()


def test_after_every_update_trainer_and_engine_agree_on_log_probs(loop, live):
    async def check():
        for _ in range(3):
            groups, row = await step(live)
            assert row["version"] == str(live.mesh.version)
            fresh = await live.sample(mw.single_turn(parity), live.stream(tasks().train).take(4), n=8)
            trajectories = [t for g in fresh for t in g.trajectories]
            assert {t.version for t in trajectories} == {live.mesh.version}
            batch = mw.pack(trajectories, [1.0] * len(trajectories))
            mine = await live.mesh.trainer.logprobs(batch)
            worst = (mine - batch.logprobs)[batch.mask].abs().max().item()
            assert batch.mask.sum() >= 32 and worst < 1e-4, worst

    loop.run(check())


def test_a_run_listens_on_loopback_only(loop, live):
    loop.run(step(live))
    fleet = live.mesh.fleet
    assert fleet.tmp.stat().st_mode & 0o777 == 0o700, "Monarch's sockets are for nobody else"
    pids = processes.by_token(fleet.token)
    assert len(pids) >= 6
    where = {pid: listeners(pid) for pid in [*pids, os.getpid()]}
    assert {address for found in where.values() for address in found} <= {"127.0.0.1", "::1"}, where


def test_rewards_get_no_credentials(loop, live):
    def spy(prompt, completion):
        with open("/proc/self/environ", "rb") as file:
            begun = b"known to the controller" in file.read()
        return 4.0 * (SECRET in os.environ) + 2.0 * begun + ("PATH" in os.environ)

    async def check():
        groups = await live.sample(mw.single_turn(spy), live.stream(tasks().train).take(2), n=2)
        assert {t.reward for g in groups for t in g.trajectories} == {1.0}

    loop.run(check())


def test_live_parameters_equal_an_engine_started_from_the_exported_folder(loop, live, tmp_path):
    async def check():
        await step(live)
        here = await live.mesh.rollout.checksums()
        folder = await live.mesh.trainer.export(tmp_path / "exported")
        async with await mw.up("local", model=folder, roles=("rollout",)) as other:
            there = await other.rollout.checksums()
        assert here["rollout0"] and here["rollout0"] == there["rollout0"]

    loop.run(check())


def test_a_reward_that_fails_drops_its_sample_with_the_reason_and_hangs_nothing(loop, live):
    def faulty(prompt, completion):
        kind = int(prompt.info["a"]) % 4
        if kind == 0:
            raise ValueError("no such answer")
        if kind == 1:
            return float("nan")
        if kind == 2:
            import time

            time.sleep(600)
        return 1.0

    async def check():
        env = mw.single_turn(faulty, deadline_s=2.0)
        chosen = [p for p in live.render(tasks().train) if p.info["b"] == 1 and p.info["a"] < 8][:8]
        began = time.monotonic()
        groups = await live.sample(env, chosen, n=2)
        assert time.monotonic() - began < 60
        for group in groups:
            for t in group.trajectories:
                kind = group.prompt.info["a"] % 4
                word = {0: "ValueError", 1: "nan", 2: "deadline", 3: None}[kind]
                if word is None:
                    assert t.reward == 1.0 and t.dropped is None
                else:
                    assert t.reward is None and word in t.dropped.lower() or word in t.dropped, t.dropped

    loop.run(check())


def test_a_step_in_which_nothing_could_be_scored_says_why(loop, live):
    def broken(prompt, completion):
        raise KeyError("gold")

    with pytest.raises(DataError, match="KeyError"):
        loop.run(live.sample(mw.single_turn(broken), live.stream(tasks().train).take(2), n=2))


def test_a_prompt_longer_than_the_context_is_refused_by_name(live):
    long = mw.Prompt(id="war-and-peace", messages=[{"role": "user", "content": "well " * 1000}])
    with pytest.raises(DataError, match="war-and-peace"):
        live.render([long])


def test_log_probs_of_a_smaller_support_are_kept_out_of_a_ratio(loop, live):
    async def check():
        groups = await live.sample(mw.single_turn(parity), live.stream(tasks().train).take(2), n=2, sampling=mw.Sampling(max_tokens=4, top_k=5))
        with pytest.raises(DataError, match="top_k"):
            mw.batch(groups, mw.algorithms.grpo)

    loop.run(check())


def test_an_interrupted_step_happens_whole_or_not_at_all(loop, live):
    async def check():
        prompts = live.stream(tasks().train).take(4)
        before = live.step
        sampling = asyncio.ensure_future(live.sample(mw.single_turn(parity), prompts, n=8))
        await asyncio.sleep(0.05)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        assert live.step == before
        groups = await live.sample(mw.single_turn(parity), prompts, n=8)
        training = asyncio.ensure_future(live.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss()))
        await asyncio.sleep(0.01)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert live.step == before + 1
        again = await live.sample(mw.single_turn(parity), prompts, n=2)  # publishes what was not published
        assert {t.version for g in again for t in g.trajectories} == {live.mesh.version}

    loop.run(check())


def test_a_loss_of_ones_own_trains_and_one_that_is_not_finite_is_refused(loop, live):
    def reinforce(batch, policy):
        return -batch.advantages * policy.logprobs, {"mine": policy.logprobs.detach()}

    def poison(batch, policy):
        return policy.logprobs * math.inf

    async def check():
        groups = await live.sample(mw.single_turn(parity), live.stream(tasks().train).take(2), n=4)
        batch = mw.batch(groups, lambda rewards, groups: rewards - rewards.mean())
        before, digest = live.step, await live.mesh.trainer.checksum()
        with pytest.raises(mw.MilkweedError, match="finite|inf|nan"):
            await live.train(batch, poison)
        assert live.step == before and await live.mesh.trainer.checksum() == digest
        metrics = await live.train(batch, reinforce)
        assert live.step == before + 1 and metrics["mine"] < 0
        await live.publish()

    loop.run(check())


def test_A2_a_step_in_which_no_group_has_signal_is_a_step_of_gradient_zero(loop, live):
    """Counters, logs and the version go on as after any other step."""

    async def check():
        before = live.step
        groups = await live.sample(mw.single_turn(praise), live.stream(tasks().train).take(2), n=4)
        metrics = await live.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss())
        assert (metrics["loss"], metrics["grad_norm"], live.step) == (0.0, 0.0, before + 1)
        await live.publish()
        assert live.mesh.rollout.version == live.mesh.version
        assert mw.read_metrics(live.directory.path)[-1]["step"] == before + 1

    loop.run(check())


def test_a_second_controller_on_the_same_run_is_refused(loop, live, model):
    with pytest.raises(RunLocked, match="pid"):
        loop.run(mw.Run.open(config(live.directory.path), model=model))


def test_a_run_resumes_from_its_checkpoint(loop, model, tmp_path):
    settings = config(tmp_path / "run", steps=3, checkpoint_every=2)

    async def first():
        async with mw.start(settings, model=model) as run:
            stream = run.stream(tasks().train)
            async for number in run.steps():
                groups = await run.sample(mw.single_turn(parity), stream.take(4), n=4)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss())
                await run.publish()
                if number == 2:
                    run.state["seen"] = "so far"
                if number == 3:
                    raise ZeroDivisionError  # the checkpoint of step 2 is the last there is

    async def second():
        async with mw.start(settings, model=model) as run:
            assert run.resumed and run.step == 2
            stream = run.stream(tasks().train)
            assert stream.taken == 8 and run.state == {"seen": "so far"}
            numbers = []
            async for number in run.steps():
                numbers.append(number)
                groups = await run.sample(mw.single_turn(parity), stream.take(4), n=4)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss())
                await run.publish()
            assert numbers == [3]

    with pytest.raises(ZeroDivisionError):
        loop.run(first())
    with pytest.raises(ConfigError, match=r"trainer\.lr"):
        loop.run(mw.Run.open(config(tmp_path / "run", trainer=mw.TrainerConfig(lr=9.0, seq_len=128, micro_rows=16)), model=model))
    loop.run(second())
    steps = [r["step"] for r in mw.read_metrics(tmp_path / "run") if "time/step" in r]
    assert steps == [1, 2, 3]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["trainer"]["lr"] == 1e-3 and os.path.isdir(tmp_path / "run" / "checkpoints")
