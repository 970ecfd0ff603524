"""Updates while requests stream and what reads the weights is killed: every token's log-prob is that of the version it
names, as a second trainer gets it that goes through the same updates."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
import torch

import milkweed as mw
from milkweed.config import FaultsConfig, load_mesh
from milkweed.config.mesh import TransferConfig
from milkweed.errors import FleetError, TransferError
from milkweed.training import Trainer

pytestmark = pytest.mark.stack
SETTINGS = mw.TrainerConfig(lr=1e-3, seq_len=256, micro_rows=32)
STREAMS = 8
WORDS = 200
"""Ids that prompts and trained sequences are made of."""


def push(batch, policy):
    return -batch.advantages * policy.logprobs


def teaching(step: int) -> mw.Batch:
    """What update `step` trains on: noise, so that versions differ and none is like another."""
    dice = random.Random(step)
    sequences = []
    for _ in range(4):
        ids = [dice.randrange(WORDS) for _ in range(24)]
        mask, logprobs = [False] + [True] * 23, [0.0] * 24
        sequences.append(mw.Trajectory(token_ids=ids, loss_mask=mask, logprobs=logprobs, versions=[], turns=[], finish_reason="stop", sampling=mw.Sampling(), reward=0.0))
    return mw.pack(sequences, [dice.uniform(-1, 1) for _ in sequences])


async def stream(rollout, number: int, done: asyncio.Event, into: list[mw.Completion]) -> None:
    dice = random.Random(f"stream {number}")
    while not done.is_set():
        prompt = [dice.randrange(WORDS) for _ in range(dice.randint(4, 20))]
        into.append(await rollout.sample(prompt, mw.Sampling(max_tokens=dice.randint(10, 150), ignore_eos=True), name=f"stream {number}", deadline_s=120))


async def killer(mesh, every_s: float, done: asyncio.Event, killed: list[int]) -> None:
    """Kills the process that reads the weights for the engines, ever again."""
    dice = random.Random(1)
    while not done.is_set():
        await asyncio.sleep(dice.uniform(0.2, 1.8) * every_s)
        for puller in mesh.pullers:
            if puller.failure is None and not puller.stopped:
                os.kill(puller.pids[0], signal.SIGKILL)
                killed.append(puller.pids[0])


def spans(completions: list[mw.Completion]) -> dict[int, list[mw.Trajectory]]:
    """By step of the version: the sequences up to the last token of it, with only that version's tokens to compare."""
    found = defaultdict(list)
    for completion in completions:
        whole, n = completion.trajectory(1.0), len(completion.prompt_ids)
        at = 0
        for span in completion.versions:
            assert span.start == at < span.end, "spans lie side by side"
            at = span.end
            mask = [n + span.start <= i < n + span.end for i in range(n + span.end)]
            found[span.version.step].append(msgspec.structs.replace(whole, token_ids=whole.token_ids[: len(mask)], logprobs=whole.logprobs[: len(mask)], loss_mask=mask, versions=[], turns=[]))
        assert at == len(completion.token_ids)
    return found


async def difference(trainer: Trainer, sequences: list[mw.Trajectory]) -> float:
    batch = mw.pack(sequences)
    return float((await trainer.logprobs(batch) - batch.logprobs)[batch.mask].abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("updates", [20, 1000])
def test_tokens_sampled_while_weights_change_are_those_of_the_version_they_name(tmp_path: Path, updates: int):
    async def scenario() -> None:
        model = mw.new_qwen3(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
        tireless = FaultsConfig(retries=9999, role_retries=9999, host_retries=9999, most_s=0)
        config = msgspec.structs.replace(load_mesh("local"), transfer=TransferConfig(transport="nixl"), faults=tireless)
        async with await mw.up(config, model=model, trainer=SETTINGS, roles=("trainer", "rollout"), run_dir=tmp_path / "run") as mesh:
            mesh.update_deadline_s = 20.0
            completions: list[mw.Completion] = []
            killed: list[int] = []
            failed: list[str] = []
            done = asyncio.Event()
            await mesh.publish()
            async with asyncio.TaskGroup() as group:
                for number in range(STREAMS):
                    group.create_task(stream(mesh.rollout, number, done, completions))
                hunt = group.create_task(killer(mesh, 3.0 if updates < 100 else 6.0, done, killed))
                for step in range(1, updates + 1):
                    await mesh.trainer.update(teaching(step), push)
                    try:
                        await mesh.publish()
                    except (TransferError, FleetError) as error:  # the old version goes on being served
                        failed.append(str(error))
                    serving = mesh.rollout.versions()
                    assert all(v.step <= step for v in serving.values())
                done.set()
                hunt.cancel()
            assert mesh.rollout.versions() and killed
            of = spans(completions)
            across = sum(len(c.versions) > 1 for c in completions)
            print(f"{updates} updates, {len(failed)} failed, {len(killed)} readers killed, {len(completions)} completions, {across} under several versions, {len(of)} versions seen")
            assert across and len(of) > updates / 2

            second = await Trainer.start(mesh.fleet, model, SETTINGS, role="reference")
            worst, elsewhere = 0.0, []
            for step in range(updates + 1):
                if step:
                    await second.update(teaching(step), push)
                if step in of:
                    worst = max(worst, await difference(second, of[step]))
                if step + 1 in of and step % 10 == 0:
                    elsewhere.append(await difference(second, of[step + 1]))
            print(f"largest difference of log-probs {worst:.2e}; under the version before {sorted(elsewhere)[len(elsewhere) // 2]:.2e}")
            assert worst < 1e-4
            assert torch.tensor(elsewhere).median() > 1e-3, "versions are too alike for this to prove anything"
            await second.close()

    asyncio.run(scenario())
