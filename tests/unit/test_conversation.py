"""Trajectories of many turns: exact ids, masks on what was sampled, segments where a template rewrites, limits."""

from __future__ import annotations

import asyncio
import warnings

import pytest
from chat_support import MODELS, USER, Scripted, chat_like, check_exact, play, talk_of, through, times

from milkweed.environments import conversation as module
from milkweed.environments.conversation import Limits
from milkweed.runs.batch import batch, turn_rewards
from milkweed.runs.sampling import Handle, sample_groups
from milkweed.types import Group, Prompt, Sampling

CALLS = {
    "qwen3": '<tool_call>\n{"arguments": {"b": 12, "a": 12},  "name": "times"}\n</tool_call>',
    "llama3": '{"name": "times", "parameters": {"b": 12,   "a": 12}}',
    "smollm2": '<tool_call>[{"name": "times", "arguments": {"b": 12, "a": 12}}]</tool_call>',
}


@pytest.fixture(params=sorted(MODELS))
def name(request):
    return request.param


@pytest.fixture
def chat(name, tmp_path):
    return chat_like(name, tmp_path / name)


def test_tool_turns_keep_the_sampled_ids_and_the_templates_own_text_around_them(name, chat):
    """Odd spacing and key order of a call stand as sampled; an answer with white space at its end keeps it."""
    t, talk, router = play(chat, [CALLS[name], " it is 144 \n"], through, tools=[times])
    check_exact(t, router, chat)
    assert not t.segments and [u.role for u in t.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert talk.messages[2]["content"] == "144" and talk.replies[0].tool_calls[0].arguments == {"a": 12, "b": 12}
    raw = chat.decode(t.token_ids, skip_special_tokens=False)
    assert CALLS[name] in raw and " it is 144 \n" in raw and raw.count("times") >= 2
    # what the template writes between the two turns is what it writes for messages that nobody sampled
    said = [*USER, {"role": "assistant", "content": CALLS[name]}, {"role": "tool", "content": "144", "name": "times"}]
    middle = t.turns[2]
    between = chat.decode(t.token_ids[middle.start : middle.end], skip_special_tokens=False)
    assert chat.text(said).endswith(between) and "144" in between
    assert t.finish_reason == "stop" and t.reward == 1.0


def test_an_ids_sequence_that_no_tokenizer_would_give_is_trained_as_it_is(chat):
    """T1, T2: `he` + `llo` sampled letter by letter stays so, though its text would come back as one token."""
    letters = [chat.encode(c)[0] for c in "hello"]
    assert chat.encode("hello") != letters

    async def two_turns(talk):
        await talk.reply()
        await talk.reply("go on")
        return talk.trajectory()

    t, _, router = play(chat, [[*letters, chat.eos_id], "yes"], two_turns)
    check_exact(t, router, chat)
    first = t.turns[1]
    assert t.token_ids[first.start : first.end] == [*letters, chat.eos_id]


def test_consecutive_tool_messages_are_both_shown(name, chat):
    """T5."""
    two = {
        "qwen3": CALLS["qwen3"] + "\n" + CALLS["qwen3"].replace('"b": 12', '"b": 3'),
        "llama3": CALLS["llama3"] + "; " + CALLS["llama3"].replace('"b": 12', '"b": 3'),
        "smollm2": '<tool_call>[{"name": "times", "arguments": {"a": 12, "b": 12}}, {"name": "times", "arguments": {"a": 12, "b": 3}}]</tool_call>',
    }[name]
    t, _, router = play(chat, [two, "done"], through, tools=[times])
    middle = chat.decode(t.token_ids[t.turns[2].start : t.turns[2].end], skip_special_tokens=False)
    assert "144" in middle and "36" in middle
    check_exact(t, router, chat)


def test_a_template_that_drops_thinking_splits_into_segments_that_count_once(tmp_path):
    """T3."""
    chat = chat_like("qwen3", tmp_path / "q")
    module._warned.clear()

    async def two_turns(talk):
        await talk.reply()
        await talk.reply("and 2?")
        return talk.trajectory(reward=0.5)

    lines = ["<think>\nhm\n</think>\n\none", "<think>\nha\n</think>\n\ntwo"]
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        t, _, router = play(chat, lines, two_turns)
    assert [len(t.segments), len(router.asked)] == [1, 2]
    check_exact(t, router, chat)
    assert "hm" not in chat.decode(t.token_ids) and "hm" in chat.decode(t.segments[0].token_ids)
    assert t.token_ids[: len(router.asked[1])] == router.asked[1]
    kept, _, _ = play(chat, lines, two_turns, history="keep")
    assert not kept.segments and "hm" in chat.decode(kept.token_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning a model is enough
        play(chat, lines, two_turns)

    other, _, _ = play(chat, ["four", "five"], two_turns)
    other.reward = 0.0
    for i, one in enumerate((t, other)):
        for s in one.sequences:
            s.id = f"g/{i}"
    group = Group(id="g", prompt=Prompt(id="g", messages=USER), trajectories=[t, other])
    seen = {}

    def advantages(rewards, groups):
        seen["rewards"] = rewards.tolist()
        return rewards - rewards.mean()

    packed = batch([group], advantages, normalise="sequence")
    assert seen["rewards"] == [0.5, 0.0], "two segments are one sample"
    assert packed.totals["sequences"] == 2 and packed.totals["tokens"] == t.sampled + other.sampled
    values = {round(a, 3) for a in packed.advantages[packed.mask].tolist()}
    assert values == {0.25, -0.25}
    both = packed.weights[packed.advantages > 0].sum().item()
    assert both == pytest.approx(0.5), "both segments of a trajectory together weigh as much as one trajectory"


def test_an_alternate_end_token_is_a_stop_and_a_missing_one_is_supplied_unsampled(name, chat):
    """T13, T14: what the template puts after a turn is added, but not trained, where a stop string ended the turn."""
    alternate = chat.eos_ids[1]

    async def two_turns(talk):
        await talk.reply()
        await talk.reply("go on")
        return talk.trajectory()

    for said in ([*chat.encode("a"), alternate], chat.encode("a stop")):
        t, talk, router = play(chat, [said, "b"], two_turns)
        check_exact(t, router, chat)
        after = t.token_ids[t.turns[2].start : t.turns[2].end]
        assert (chat.eos_id in after[:1]) == (said[-1] != alternate)
        assert t.finish_reason == "stop" and not t.segments


def test_an_empty_or_end_only_turn_is_a_turn(chat):
    """T10."""

    async def two_turns(talk):
        await talk.reply()
        await talk.reply("say something")
        return talk.trajectory(reward=0.0)

    t, talk, router = play(chat, [[chat.eos_id], "b"], two_turns)
    check_exact(t, router, chat)
    assert talk.replies[0].text == "" and t.dropped is None
    t, talk, _ = play(chat, [[], [chat.eos_id]], two_turns)
    assert t.sampled == 1 and t.dropped is None


def test_nothing_follows_a_turn_that_was_cut(chat):
    """T24."""

    async def two_turns(talk):
        await talk.reply()
        assert await talk.reply("go on") is None
        return talk.trajectory(reward=0.0)

    t, talk, router = play(chat, ["it is…", "never"], two_turns)
    assert t.finish_reason == "length" and len(router.asked) == 1


def test_limits_on_turns_tokens_and_time_are_finish_reasons(chat):
    async def ask_on(talk):
        async for _ in talk:
            talk.add("more")
        return talk.trajectory(reward=0.0)

    t, talk, _ = play(chat, lambda text: "word", ask_on, limits=Limits(turns=3))
    assert t.finish_reason == "turns" and len(talk.replies) == 3
    t, talk, _ = play(chat, lambda text: "word", ask_on, limits=Limits(tokens=12))
    assert t.finish_reason == "tokens" and t.sampled == 12
    with pytest.raises(ValueError, match="limits.turns"):
        Limits(turns=0)

    async def slow():
        talk, router = talk_of(chat, lambda text: "word", limits=Limits(seconds=0.2))

        async def sample(ids, sampling):
            if talk.replies:
                await asyncio.sleep(30)
            return await router.sample(ids, sampling)

        talk._sample = sample
        return await ask_on(talk)

    t = asyncio.run(slow())
    assert t.finish_reason == "time" and t.sampled > 0 and t.dropped is None


def test_the_context_ends_a_conversation_before_an_engine_refuses_it(tmp_path):
    chat = chat_like("smollm2", tmp_path / "s", context=160)

    async def ask_on(talk):
        async for _ in talk:
            talk.add("more")
        return talk.trajectory(reward=0.0)

    t, _, router = play(chat, lambda text: "word " * 4, ask_on)
    assert t.finish_reason == "tokens" and len(t.token_ids) <= 160
    assert all(len(ids) < 160 for ids in router.asked)


def test_an_aborted_turn_is_dropped_not_trained(chat):
    """T25."""

    async def run():
        talk, router = talk_of(chat, ["half"])

        async def sample(ids, sampling):
            completion = await router.sample(ids, sampling)
            completion.finish_reason, completion.error = "abort", "engine went away"
            return completion

        talk._sample = sample
        await talk.reply()
        return talk.trajectory(reward=1.0)

    t = asyncio.run(run())
    assert t.dropped == "sampling ended with abort: engine went away"


# ---- policy.chat, gyms, players


def test_chat_calls_that_bring_their_history_are_joined_and_branches_are_context_only(name, chat):
    async def run():
        router = Scripted(chat, lambda text: f"say {len(text)} \n")
        policy = Handle(router, Sampling(max_tokens=64), "s", None, chat)
        messages = list(USER)
        for _ in range(3):
            reply = await policy.chat(messages)
            # as a client sends it back: stripped
            messages += [{"role": "assistant", "content": reply.text.strip()}, {"role": "user", "content": "go on"}]
        straight = policy.trajectory(reward=1.0)
        await policy.chat(messages[:2] + [{"role": "user", "content": "instead"}])
        return straight, policy.trajectory(reward=1.0), router

    straight, branched, router = asyncio.run(run())
    assert not straight.segments and [t.role for t in straight.turns].count("assistant") == 3
    assert len(branched.segments) == 1 and branched.sampled == sum(
        len(chat.encode(f"say {len(chat.decode(i, skip_special_tokens=False))} \n")) + 1 for i in router.asked
    )
    for t in (straight, branched):
        check_exact(t, router if t is branched else Scripted(chat, []), chat)


class Counter:
    """A gym: count up to three."""

    system = "Count."
    closed = 0

    def reset(self, task):
        self.n = 0
        return f"begin, {task.id}"

    async def step(self, action):
        self.n += action == str(self.n + 1)
        return f"you are at {self.n}", float(self.n), self.n >= 3

    def close(self):
        Counter.closed += 1


def test_a_class_with_reset_step_close_and_a_function_are_the_same_to_the_loop(chat):
    prompts = [Prompt(id=f"p{i}", messages=[], token_ids=[1]) for i in range(2)]

    def lines(text):
        return str(int(text.rpartition("you are at ")[2][0]) + 1) if "you are at" in text else "1"

    Counter.closed = 0
    groups = asyncio.run(
        sample_groups(
            Counter, prompts, Scripted(chat, lines), chat=chat, samples=2, sampling=Sampling(max_tokens=9), key="1"
        )
    )
    assert [g.rewards for g in groups] == [[6.0, 6.0]] * 2 and Counter.closed == 4
    t = groups[0].trajectories[0]
    assert [u.reward for u in t.turns if u.role == "assistant"] == [1.0, 2.0, 3.0]
    (row,) = turn_rewards(t)
    assert sum(row) == 6.0 and row[-1] == 3.0
    import torch

    packed = batch(groups, lambda rewards, numbers: torch.ones_like(rewards))
    assert packed.extra["rewards"].sum().item() == 24.0


def test_players_of_one_environment_are_grouped_by_player(chat):
    async def duel(task, policy):
        for _ in range(2):
            a = await policy.chat([{"role": "user", "content": "you are a"}], agent="a")
            await policy.chat([{"role": "user", "content": f"you are b; a said {a.text}"}], agent="b")
        return [policy.trajectory(1.0, agent="a"), policy.trajectory(-1.0, agent="b")]

    prompt = Prompt(id="p", messages=USER, token_ids=[1])
    groups = asyncio.run(
        sample_groups(
            duel,
            [prompt],
            Scripted(chat, lambda t: "x"),
            chat=chat,
            samples=3,
            sampling=Sampling(max_tokens=9),
            key="1",
        )
    )
    assert [(g.id, g.rewards) for g in groups] == [("1/p#a", [1.0] * 3), ("1/p#b", [-1.0] * 3)]
    assert groups[0].trajectories[2].id == "1/p#a/2" and len({t.seed for g in groups for t in g.trajectories}) == 6
