"""Other people's gyms, run for real: reasoning-gym, gymnasium, skyrl-gym."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from chat_support import Scripted, chat_like

from milkweed.data import from_reasoning_gym
from milkweed.environments import reasoning_gym_score
from milkweed.environments.gyms import gymnasium_env, skyrl_env
from milkweed.errors import ConfigError
from milkweed.runs.sampling import sample_groups
from milkweed.types import Prompt, Sampling

# these have no answer of their own to score: many are right, and only `score_answer` knows
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
WITHOUT_DEFAULTS = {"composite"}  # a mixture of the others, which must be named


def play(env, prompts, lines, tmp_path, **options):
    chat = chat_like("smollm2", tmp_path / "s")
    work = sample_groups(
        env, prompts, Scripted(chat, lines), chat=chat, samples=1, sampling=Sampling(max_tokens=64), key="1", **options
    )
    return [g.trajectories[0] for g in asyncio.run(work)]


def test_every_task_of_reasoning_gym_scores_its_own_answer_as_right():
    from reasoning_gym.factory import DATASETS

    wrong = {}
    for name in sorted(set(DATASETS) - WITHOUT_DEFAULTS):
        (prompt,) = from_reasoning_gym(name, 1, 0)
        if name in WITHOUT_ANSWER:
            assert prompt.answer is None
        elif (score := reasoning_gym_score(prompt, f"<answer>{prompt.answer}</answer>")) != 1.0:
            wrong[name] = score
    assert not wrong and len(DATASETS) > 100


def test_a_gymnasium_environment_is_played_by_words(tmp_path):
    pytest.importorskip("gymnasium", reason="an optional package")
    moves = {"stick": 0, "hit": 1}

    def action(text):
        if text not in moves:
            raise ValueError("say hit or stick")
        return moves[text]

    env = gymnasium_env("Blackjack-v1", action=action, describe=lambda o: f"you {o[0]}, dealer {o[1]}")
    prompts = [Prompt(id=str(i), messages=[], info={"seed": i}) for i in range(6)]

    def lines(text):
        if "say hit or stick" not in text:
            return "hm"
        return "hit" if int(text.rsplit("you ", 1)[1].split(",")[0]) < 17 else "stick"

    played = play(env, prompts, lines, tmp_path)
    assert all(
        t.dropped is None and t.reward in (-1.0, 0.0, 1.0, 1.5) and t.reward_parts["done"] == 1.0 for t in played
    )
    assert len({t.reward for t in played}) > 1
    assert [t.reward for t in played] == [t.reward for t in play(env, prompts, lines, tmp_path)], "the task's seed"
    (bad,) = play(gymnasium_env("NoSuch-v0", action=str), prompts[:1], lines, tmp_path)
    assert "NoSuch-v0" in bad.dropped


def test_a_skyrl_gym_environment_gives_its_turns_and_rewards(tmp_path):
    pytest.importorskip("skyrl_gym", reason="an optional package")
    task = Prompt(id="p", messages=[{"role": "user", "content": "2+2?"}], answer="4")
    (t,) = play(skyrl_env("gsm8k_multi_turn"), [task], ["#### 5", "hm", "#### 4"], tmp_path)
    assert [round(u.reward, 2) for u in t.turns if u.role == "assistant"] == [
        0.04,
        0.0,
        1.0,
    ] and t.reward == pytest.approx(1.04)
    (t,) = play(skyrl_env("gsm8k"), [task], ["#### 4"], tmp_path)
    assert t.reward == 1.0
    with pytest.raises(ConfigError, match="no environment 'gsm9k'"):
        skyrl_env("gsm9k")


def test_a_gym_that_hangs_holds_up_neither_the_others_nor_the_end(tmp_path):
    class Hangs:
        def reset(self, task):
            return "go"

        def step(self, action):
            if action == "hang":
                time.sleep(600)
            return None, 1.0, True

    prompts = [Prompt(id=n, messages=[{"role": "user", "content": n}]) for n in ("hang", "well")]
    start = time.monotonic()
    hung, well = play(Hangs, prompts, lambda text: "hang" if "hang" in text else "well", tmp_path, deadline_s=1.0)
    assert well.reward == 1.0 and "deadline" in hung.dropped and time.monotonic() - start < 10
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("aside"))
