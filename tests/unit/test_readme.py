"""The README's code is run, not believed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

import milkweed as mw
from milkweed.types import Batch

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def block(name: str) -> str:
    """The code that follows `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block {name!r}"
    return found.group(1)


def lines(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def test_the_algorithm_of_ones_own_is_short_and_right():
    code = block("algorithm")
    assert lines(code) <= 15
    names: dict = {"torch": torch}
    exec(code, names)
    advantages = names["best_of_group"](torch.tensor([0.0, 1.0, 0.5, 0.2]), torch.tensor([0, 0, 1, 1]))
    assert advantages.tolist() == [0.0, 1.0, 1.0, 0.0]
    zeros = torch.zeros(1, 3)
    batch = Batch(
        tokens=zeros.long(), positions=torch.arange(3)[None], segments=zeros.long(), mask=torch.tensor([[False, True, True]]),
        weights=zeros, logprobs=zeros, advantages=torch.tensor([[0.0, -1.0, 1.0]]),
    )  # fmt: skip

    class Policy:
        logprobs = torch.tensor([[0.0, -9.0, -9.0]], requires_grad=True)

    names["reinforce_with_floor"](batch, Policy).sum().backward()
    assert Policy.logprobs.grad.tolist() == [[0.0, 0.0, -1.0]]


def test_the_environment_of_ones_own_is_short_and_scores():
    code = block("environment")
    assert lines(code) <= 15
    names: dict = {"mw": mw}
    exec(code, names)
    said = iter(["?", "046"])

    class Policy:
        async def sample(self, token_ids, sampling=None):
            return mw.Completion(
                prompt_ids=list(token_ids), token_ids=[5], logprobs=[-1.0], finish_reason="stop", versions=[], sampling=mw.Sampling(), text=next(said)
            )

    async def go():
        scorer = mw.Scorer.local(1)
        from milkweed.environments.reward import use

        with use(scorer):
            trajectory = await names["guess"](mw.Prompt(id="1", messages=[], answer="046", token_ids=[1, 2]), Policy())
        await scorer.close()
        return trajectory

    trajectory = asyncio.run(go())
    assert trajectory.reward == 1.0 and trajectory.reward_parts == {"reward": 1.0, "length": 3.0} or trajectory.reward_parts == {"length": 3.0}


def test_the_recipe_shown_is_the_recipe_that_runs():
    recipe = (Path(__file__).resolve().parents[2] / "recipes" / "grpo.py").read_text()
    shown = re.search(r"`recipes/grpo.py`, without its configuration:\n\n```python\n(.*?)```", README, re.DOTALL)
    assert shown and shown.group(1).strip() in recipe


@pytest.mark.parametrize("heading, least", [("## When something fails", 10), ("## Trust", 5)])
def test_behind_each_point_on_faults_and_on_trust_stands_a_test(heading, least):
    page = README.split(heading)[1].split("\n## ")[0]
    tests = "".join(f.read_text() for f in Path(__file__).resolve().parents[1].rglob("test_*.py"))
    points = page.split("\n- ")[1:]
    assert len(points) >= least
    for point in points:
        named = re.findall(r"`(test_\w+)`", point)
        assert named, f"no test stands behind: {point[:80]}"
        for name in named:
            assert f"def {name}(" in tests, f"the README names {name}, which there is not"
