"""Agents on the real stack: what was sampled in many turns, by tools and through the gateway, is what the trainer
sees."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from rich.console import Console

import milkweed as mw
from milkweed.config.mesh import mesh_files
from milkweed.observe.show import show_run

pytestmark = pytest.mark.stack
CONTROLLER = os.getpid()
RECIPES = Path(__file__).parents[2] / "recipes"
# a random model hardly ever ends a turn: it does at half of all letters here
SAMPLING = mw.Sampling(max_tokens=12, stop_token_ids=tuple(range(40, 170)))


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


def with_workers(folder: Path) -> Path:
    """The local mesh, whose environments run in a process of their own."""
    (folder / "mesh.toml").write_text((mesh_files() / "local.toml").read_text() + "\n[environment]\nreplicas = 1\n")
    return folder / "mesh.toml"


@pytest.fixture(scope="module", params=["controller", pytest.param("workers", marks=pytest.mark.slow)])
def live(request, loop, tmp_path_factory):
    """A run whose environments are in the controller, or in workers."""
    size = dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
    model = mw.new_qwen3(tmp_path_factory.mktemp("model"), context=4096, **size)
    trainer = mw.TrainerConfig(lr=1e-3, seq_len=4096, micro_rows=2)
    config = mw.RunConfig(
        mesh=str(with_workers(tmp_path_factory.mktemp("mesh"))) if request.param == "workers" else "local",
        run_dir=str(tmp_path_factory.mktemp("runs") / "run"),
        steps=50,
        sampling=SAMPLING,
        trainer=trainer,
    )
    run = loop.run(mw.Run.open(config, model=model))
    yield run
    loop.run(run.close())


TASKS = [mw.Prompt(id=f"t{i}", messages=[{"role": "user", "content": f"task {i}"}]) for i in range(4)]


async def three_turns(task, policy):
    """Turns with messages between them, and one that goes on from an earlier point."""
    talk = policy.talk(task.messages, limits=mw.Limits(turns=3))
    async for reply in talk:
        talk.reward(0.25)
        talk.add({"role": "tool", "content": f"seen {len(reply.raw)}"}, "go on")
    return talk.trajectory(float(len(task.id)), {"elsewhere": float(os.getpid() != CONTROLLER)})


def agent(task, base_url, api_key):
    """A loop on the `openai` client."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = list(task.messages)
    for turn in range(3):
        said = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.3, logprobs=True)
        assert len(said.choices[0].logprobs.content) == said.usage.completion_tokens
        messages += [said.choices[0].message, {"role": "user", "content": f"and {turn}?"}]
    client.chat.completions.create(model="gpt-4o", messages=[*messages[:2], {"role": "user", "content": "or else"}])
    return float(len(said.choices[0].message.content))


async def worst_difference(run, groups):
    """Between the engine's and the trainer's log-probs over every sampled token of every sequence."""
    sequences = [s for g in groups for t in g.trajectories for s in t.sequences]
    assert not [t.dropped for g in groups for t in g.trajectories if t.dropped]
    batch = mw.pack(sequences)
    mine = await run.mesh.trainer.logprobs(batch)
    assert batch.mask.sum() == sum(sum(s.loss_mask[1:]) for s in sequences)
    return (mine - batch.logprobs)[batch.mask].abs().max().item()


def test_every_sampled_token_of_many_turns_replays_and_trains(loop, live):
    async def check():
        prompts = live.render(TASKS)
        for _ in range(2):
            groups = await live.sample(three_turns, prompts, n=4)
            turns = [t.role for g in groups for x in g.trajectories for t in x.turns]
            assert turns.count("assistant") > 2 * 16
            assert {t.reward_parts["elsewhere"] for g in groups for t in g.trajectories} == {float(live.mesh.environment is not None)}
            assert await worst_difference(live, groups) < 1e-4
            batch = mw.batch(groups, mw.algorithms.dr_grpo)
            assert "rewards" in batch.extra
            before = await live.mesh.trainer.logprobs(batch)
            await live.train(batch, mw.algorithms.grpo_loss())
            assert (live.mesh.trainer.trained - before)[batch.mask].abs().max() < 1e-6
            await live.publish()
        await live._flow.ledger.flush()

    loop.run(check())
    console = Console(width=250, record=True, file=io.StringIO())
    assert show_run(live.directory.path, colour="difference", most=2, console=console) == 2
    worst = [float(x) for x in re.findall(r"differ by (\S+) at most", console.export_text())]
    assert len(worst) == 2 and max(worst) < 1e-4


def test_an_openai_agent_trains_through_the_gateway_and_its_tokens_replay(loop, live):
    async def check():
        async with mw.Gateway(live.mesh.rollout, live.mesh.chat, sampling=SAMPLING) as gateway:
            groups = await live.sample(gateway.environment(agent), live.render(TASKS), n=3)
            one = groups[0].trajectories[0]
            assert one.sampling.temperature == 1.0 and len(one.sequences) >= 2, "the other branch is a segment"
            assert await worst_difference(live, groups) < 1e-4
            before = live.step
            await live.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss())
            await live.publish()
            assert live.step == before + 1
            async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.token) as client:
                (model,) = [m async for m in await client.models.list()]
                assert model.version == str(live.mesh.version)
                stream = await client.chat.completions.create(
                    model=model.id, messages=TASKS[0].messages, stream=True, max_tokens=5
                )
                assert [c.choices[0].finish_reason for c in [x async for x in stream]][-1] in ("stop", "length")

    loop.run(check())


def stock_agent(task, base_url, api_key):
    """smolagents' tool-calling agent, as its documentation shows it; a random model hardly ever calls well."""
    from smolagents import OpenAIModel, ToolCallingAgent
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    # its own system prompt of 9,000 characters is as many tokens here
    prompts = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Answer with a tool call."}
    agent = ToolCallingAgent(tools=[], model=model, prompt_templates=prompts, max_steps=2, verbosity_level=0)
    answer = agent.run(task.text)
    return float(len(str(answer)) % 3)


def test_somebody_elses_agent_as_it_is_trains_a_step_through_the_gateway(loop, live):
    async def check():
        async with mw.Gateway(live.mesh.rollout, live.mesh.chat, sampling=SAMPLING) as gateway:
            groups = await live.sample(gateway.environment(stock_agent), live.render(TASKS[:2]), n=3)
            trajectories = [t for g in groups for t in g.trajectories]
            asked = [s.turns for t in trajectories for s in t.sequences]
            assert sum(t.role == "assistant" for turns in asked for t in turns) >= 3 * len(trajectories), "two steps and an answer"
            assert await worst_difference(live, groups) < 1e-4
            before = live.step
            await live.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss())
            await live.publish()
            assert live.step == before + 1

    loop.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["calculator", "guessing", "self_play", "code_tests", "agent", "judge"])
def test_recipe_runs(recipe, tmp_path):
    """Shown twice, sampled and trained once, evaluated, every sampled token replayed; nothing is learnt in so little."""
    assert len((RECIPES / f"{recipe}.py").read_text().splitlines()) <= 80
    small = "--shown 2 --steps 3 --eval-every 2 --prompts 4 --samples 4 --trainer.warmup-steps 1".split()
    small = ["--piles" if recipe == "self_play" and x == "--prompts" else x for x in small]
    replayed = [str(Path(__file__).with_name("replayed.py")), str(tmp_path / "notes.jsonl"), str(RECIPES / f"{recipe}.py")]
    done = subprocess.run(
        [sys.executable, *replayed, "--run-dir", str(tmp_path / "run"), *small],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {r["step"] for r in rows} == {1, 2, 3} and any("held_out/reward" in r for r in rows)
    (trained,) = [r for r in rows if r["step"] == 3 and "reward" in r]
    # a player whose game ends before its turn sampled nothing; no other drop is in order
    odd = [k for k in trained if k.startswith("dropped") and k != "dropped/nothing was sampled"]
    assert not odd and trained["trajectories"] + trained.get("dropped/nothing was sampled", 0) >= 16
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert {n["step"] for n in notes} >= {2} and sum(n["tokens"] for n in notes) > 50, "the batch and the evaluations"
    assert max(n["worst"] for n in notes) < 1e-4, notes
