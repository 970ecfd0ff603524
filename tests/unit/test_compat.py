"""Rewards and data sets with the signatures and columns of other frameworks, each by a small example of its kind,
scored by real reward processes."""

from __future__ import annotations

import asyncio
import re

import pytest

from milkweed import compat
from milkweed.environments import Scorer
from milkweed.errors import DataError, RewardError


def trl_reward(completions, solution, **kwargs):
    return [1.0 if s in c[0]["content"] else 0.0 for c, s in zip(completions, solution)]


def trl_length(prompts, completions, level):
    return [float(len(c) + v) for c, v in zip(completions, level)]


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (\d+)", solution_str)
    good = bool(found) and found[-1] == ground_truth
    return {"score": float(good), "found": len(found), "source": data_source, "split": extra_info["split"] == "train"}


async def slime_rm(args, sample, **kwargs):
    await asyncio.sleep(0)
    return {"score": args.scale * (sample.label in sample.response), "level": sample.metadata["level"]}


def openrlhf_func(queries, prompts, labels, **kwargs):
    import torch

    right = [float(q[len(p) :] == a) for q, p, a in zip(queries, prompts, labels)]
    return {"rewards": torch.tensor(right), "scores": torch.tensor(right), "extra_logs": {"hits": torch.tensor(right)}}


def nothing(completions, **kwargs):
    return [None]


CASES = [
    (compat.trl(trl_reward), "trl", {"prompt": [{"role": "user", "content": "2+2"}], "solution": "4"}, "it is 4", 1.0, {}),
    (compat.trl(trl_length, conversational=False), "trl", {"prompt": "2+2", "level": 3}, "four", 7.0, {}),
    (
        compat.verl(verl_score),
        "verl",
        {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+2"}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 7}},
        "so\n#### 4", 1.0, {"found": 1.0, "split": 1.0},
    ),
    (compat.slime(slime_rm, scale=0.5), "slime", {"prompt": "2+2", "label": "4", "metadata": {"level": 2}}, "4!", 0.5, {"level": 2.0}),
    (compat.openrlhf(openrlhf_func), "openrlhf", {"input": "2+2", "label": "4"}, "4", 1.0, {"hits": 1.0}),
]  # fmt: skip


def test_each_frameworks_reward_scores_its_own_rows_in_a_reward_process():
    async def run():
        scorer = Scorer.local(1, deadline_s=60.0)
        try:
            for reward, kind, row, answer, want, parts in CASES:
                (task,) = compat.prompts([row], kind)
                score = await scorer.score(reward, task, answer)
                assert score.reward == want and parts.items() <= score.parts.items(), (kind, score)
                assert task.messages[0]["content"] == "2+2"
            with pytest.raises(RewardError, match="no reward"):
                await scorer.score(compat.trl(nothing), task, "x")
        finally:
            await scorer.close()

    asyncio.run(run())


def test_rows_without_their_columns_are_named_and_ids_are_unique():
    with pytest.raises(DataError, match="verl row 1: no reward_model.ground_truth"):
        compat.prompts([{"prompt": "a", "reward_model": {"ground_truth": "1"}}, {"prompt": "b"}], "verl")
    with pytest.raises(DataError, match="none of the columns prompt"):
        compat.prompts([{"text": "a"}], "trl")
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 0}}] * 2
    assert len({p.id for p in compat.prompts(rows, "verl")}) == 2
