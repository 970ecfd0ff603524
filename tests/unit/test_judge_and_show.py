"""Judges that answer, do not answer, or cost too much; and trajectories as people see them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from chat_support import Scripted, chat_like
from rich.console import Console

from milkweed.data import pack
from milkweed.environments.conversation import Conversation
from milkweed.environments.expert import Expert
from milkweed.environments.judge import Endpoint, Engines, Judge, score_in
from milkweed.errors import DataError, RewardError
from milkweed.observe.show import show
from milkweed.observe.trained import TrainedLogprobs, read_trained
from milkweed.rollout.gateway import Gateway
from milkweed.types import PolicyVersion, Prompt, Sampling, Trajectory, VersionSpan

TASK = Prompt(id="t", messages=[{"role": "user", "content": "greet"}])


class Says:
    def __init__(self, *lines):
        self.lines, self.asked = list(lines), []

    async def ask(self, messages):
        self.asked.append(messages[0]["content"])
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        return line


def test_a_judge_asks_again_then_says_clearly_that_there_is_no_score():
    async def run():
        judge = Judge(Says("hm", RewardError("503"), "Fine.\nScore: 7"), "Be kind")
        assert await judge(TASK, "hello") == 0.7 and judge.asked == 3
        assert "Be kind" in judge.model.asked[0] and "greet" in judge.model.asked[0] and "hello" in judge.model.asked[0]
        for bad in ("Score: 11", "Score: -1", "no", "Score: nan"):
            with pytest.raises(RewardError, match="failed 2 times .*prompt t"):
                await Judge(Says(bad, bad), "", retries=1)(TASK, "x")

    asyncio.run(run())


def test_the_same_answer_is_asked_about_once_and_the_budget_holds():
    async def run():
        judge = Judge(Says("Score: 5", "Score: 1"), "", budget=2)
        assert await asyncio.gather(*(judge(TASK, "a") for _ in range(5))) == [0.5] * 5 and judge.asked == 1
        assert await judge(TASK, "b") == 0.1
        with pytest.raises(RewardError, match="budget of 2"):
            await judge(TASK, "c")

    asyncio.run(run())


def test_endpoints_and_engines_judge_and_an_endpoint_that_is_away_is_named(tmp_path):
    chat = chat_like("smollm2", tmp_path / "s")

    async def run():
        expert = Expert(chat, lambda text: "Score: 10" if "thanks" in text else "Score: 0")
        async with Gateway(expert, chat, sampling=Sampling(max_tokens=50)) as g:
            judge = Judge(Endpoint(g.base_url, "m", g.token), "")
            assert [await judge(TASK, "thanks"), await judge(TASK, "no")] == [1.0, 0.0]
            with pytest.raises(RewardError, match="answered 401"):
                await Judge(Endpoint(g.base_url, "m", "wrong"), "", retries=0)(TASK, "thanks")
        with pytest.raises(RewardError, match="did not answer"):
            await Judge(Endpoint(g.base_url, "m", g.token, deadline_s=2.0), "", retries=0)(TASK, "thanks")
        assert await Judge(Engines(expert, chat), "")(TASK, "thanks") == 1.0

    asyncio.run(run())


def test_scores_are_read_from_the_last_line_that_has_one():
    assert [score_in(t) for t in ("Score: 3\nno, Score: **4.5**", "score=2", "7", "")] == [4.5, 2.0, None, None]


def test_a_trajectory_is_shown_with_turns_rewards_and_no_control_codes(tmp_path):
    chat = chat_like("qwen3", tmp_path / "q")

    async def run():
        talk = Conversation(
            chat, Scripted(chat, ["one \x1b[31m", "two"]).sample, TASK.messages, sampling=Sampling(max_tokens=50)
        )
        await talk.reply()
        talk.reward(0.25)
        await talk.reply("more")
        return talk.trajectory(0.5, {"style": 2.0})

    t = asyncio.run(run())
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show(t, chat, advantage=-0.5))
    text = console.export_text()
    for part in ("assistant  reward 0.25", "reward 0.75", "style 2", "one ␛[31m", "two", "weights 0.3"):
        assert part in text, part
    html = show(t, chat, logprobs=[0.0] * len(t.token_ids))._repr_html_()
    assert html.startswith("<pre") and "color: #" in html
    with pytest.raises(DataError, match="log-probs for"):
        show(t, chat, logprobs=[0.0])
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show(t, chat, logprobs=lambda s: [p - 0.05 * m for p, m in zip(s.logprobs, s.loss_mask)]))
    assert "trainer and engine differ by 0.05 at most" in console.export_text()


def test_a_step_keeps_the_trainers_logprobs_by_sequence_and_forgets_old_ones(tmp_path):
    def sequence(*ids):
        n = len(ids)
        spans = [VersionSpan(1, n, PolicyVersion())]
        return Trajectory(
            token_ids=list(ids), loss_mask=[False] + [True] * (n - 1), logprobs=[0.0] + [-1.0] * (n - 1),
            versions=spans, turns=[], finish_reason="stop", sampling=Sampling(), reward=1.0,
        )  # fmt: skip

    batch = pack([sequence(1, 2, 3), sequence(4, 5), sequence(6, 7, 8, 9)], [1.0, 1.0, 1.0], row_len=6)
    values = batch.tokens.float() / -10
    log = TrainedLogprobs(tmp_path, keep=2)
    for step in (1, 2, 3):
        log.write(step, batch, values)
    log.write(4, dataclasses.replace(batch, logprobs=torch.zeros_like(batch.logprobs)), values)
    kept = read_trained(tmp_path, 3)
    assert kept.of([4, 5]) == pytest.approx([-0.4, -0.5]) and kept.of([6, 7, 8, 9]) == pytest.approx([-0.6, -0.7, -0.8, -0.9])
    assert kept.of([1, 2]) is None
    for gone in (1, 4):
        with pytest.raises(DataError, match=f"step {gone} trained nothing sampled"):
            read_trained(tmp_path, gone)
