"""The gateway spoken to by the `openai` client, over a router that is a plain object."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import openai
import pytest
from chat_support import Scripted, chat_like

from milkweed.errors import EnvironmentFailed, MilkweedError, PeerDied
from milkweed.rollout.gateway import Gateway
from milkweed.runs.sampling import sample_groups
from milkweed.types import Prompt, Sampling

USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "times", "description": "Multiplies.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]  # fmt: skip
CALL = '<tool_call>\n{"arguments": {"b": 12, "a": 12},  "name": "times"}\n</tool_call>'


def gateway(tmp_path, lines, work, **options):
    """Runs `work(gateway, client, router)`; the client has a session's key."""

    async def run():
        chat = chat_like("qwen3", tmp_path / "q")
        router = Scripted(chat, lines)
        async with asyncio.timeout(60), Gateway(router, chat, sampling=Sampling(max_tokens=300), **options) as g:
            async with (
                g.session() as session,
                openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client,
            ):
                return await work(g, client, router, session)

    return asyncio.run(run())


def test_chat_with_tools_logprobs_and_history_becomes_one_exact_trajectory(tmp_path):
    async def work(g, client, router, session):
        messages = list(USER)
        first = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, logprobs=True, temperature=0.1
        )
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        call = choice.message.tool_calls[0]
        assert call.function.name == "times" and json.loads(call.function.arguments) == {"a": 12, "b": 12}
        logprobs = [t.logprob for t in choice.logprobs.content]
        assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == CALL + "<|im_end|>"
        assert first.usage.completion_tokens == len(logprobs) and first.usage.prompt_tokens == len(router.asked[0])
        messages += [
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "144"},
        ]
        second = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content == " it is 144\n"
        # clients rewrite what they send back: other key order, stripped text
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a":12,"b":12}'
        messages += [
            {"role": "assistant", "content": "it is 144"},
            {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
        ]
        await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        return session.trajectory(reward=1.0), logprobs, router

    t, logprobs, router = gateway(tmp_path, [CALL, " it is 144\n", "yes"], work)
    assert not t.segments and t.sampled == sum(t.loss_mask) and t.reward == 1.0
    assert all(t.token_ids[: len(ids)] == ids for ids in router.asked)
    n = len(router.asked[0])
    assert t.logprobs[n : n + len(logprobs)] == logprobs and all(t.loss_mask[n : n + len(logprobs)])
    assert t.sampling.temperature == 1.0, "the run's support, whatever the agent asks for"
    assert [s.version.step for s in t.versions] == [3, 3, 3]


def test_streams_give_what_a_plain_answer_gives(tmp_path):
    async def work(g, client, router, session):
        stream = await client.chat.completions.create(
            model="any", messages=USER, tools=TOOLS, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        text, names, arguments, finish, usage, tokens = "", [], "", None, None, 0
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += len(choice.logprobs.content) if choice.logprobs else 0
                for call in choice.delta.tool_calls or []:
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
                finish = choice.finish_reason or finish
        assert (text, names, json.loads(arguments), finish) == ("say: ", ["times"], {"a": 12, "b": 12}, "tool_calls")
        assert usage.completion_tokens == tokens == session.trajectory().sampled
        async with client.chat.completions.stream(model="any", messages=USER) as events:  # the client's own joining
            final = await events.get_final_completion()
        assert final.choices[0].message.content == "two"
        pieces = [
            c.choices[0].text async for c in await client.completions.create(model="any", prompt="a", stream=True)
        ]
        assert "".join(pieces) == "three"

    gateway(tmp_path, ["say: " + CALL, "two", "three"], work)


def test_completions_of_text_and_ids_join_by_their_ids(tmp_path):
    async def work(g, client, router, session):
        first = await client.completions.create(
            model="any", prompt="hello", logprobs=1, extra_body={"return_token_ids": True}
        )
        choice = first.choices[0]
        assert choice.text == "one" and choice.logprobs.tokens == ["o", "n", "e", "<|im_end|>"]
        ids = choice.prompt_token_ids + choice.token_ids + [7, 8]
        await client.completions.create(model="any", prompt=ids)
        await client.completions.create(model="any", prompt=[9], n=2)
        return session.trajectory(reward=0.0), ids

    t, ids = gateway(tmp_path, ["one", "two", "three", "four"], work)
    joined = t.segments[0]
    assert len(t.segments) == 2 and joined.token_ids[: len(ids)] == ids and sum(joined.loss_mask) == 8
    assert joined.loss_mask[len(ids) - 2 : len(ids)] == [False, False]


def test_an_agent_that_demands_a_call_may_train_and_nobody_else_is_lied_to(tmp_path):
    async def work(g, client, router, session):
        named = {"type": "function", "function": {"name": "add"}}
        for demand in ("required", named):
            said = await client.chat.completions.create(model="any", messages=USER, tools=TOOLS, tool_choice=demand)
            assert said.choices[0].message.content == "I will not"
        async with openai.AsyncOpenAI(base_url=g.base_url, api_key=g.token, max_retries=0) as free:
            with pytest.raises(openai.BadRequestError, match="its own to choose"):
                await free.chat.completions.create(model="any", messages=USER, tools=TOOLS, tool_choice="required")

    gateway(tmp_path, ["I will not", "I will not"], work)


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path):
    async def work(g, client, router, session):
        for bad, name in (
            ({"frequency_penalty": 0.5}, "frequency_penalty"),
            ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
            ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"temperature": -1}, "temperature"),
            ({"n": 0}, "n"),
            ({"messages": []}, "messages"),
            ({"tools": [{"type": "code"}]}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError) as info:
                await client.chat.completions.create(**({"model": "any", "messages": USER} | bad))
            assert name in str(info.value) and info.value.param == name
        with pytest.raises(openai.BadRequestError, match="only text"):
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
            )
        assert [m.id async for m in await client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        assert not router.asked

    gateway(tmp_path, [], work)


def test_nobody_gets_in_without_a_key_and_a_closed_sessions_key_is_none(tmp_path):
    async def work(g, client, router, session):
        assert g.host == "127.0.0.1"
        for key in ("", "wrong", g.token[:-1]):
            async with openai.AsyncOpenAI(base_url=g.base_url, api_key=key or "x", max_retries=0) as other:
                with pytest.raises(openai.AuthenticationError):
                    await other.chat.completions.create(model="any", messages=USER)
        async with openai.AsyncOpenAI(base_url=g.base_url, api_key=g.token, max_retries=0) as master:
            answer = await master.chat.completions.create(model="any", messages=USER, temperature=0.5)
            assert answer.choices[0].message.content == "one"
        assert not session.calls
        async with g.session() as brief:
            key = brief.key
        async with openai.AsyncOpenAI(base_url=g.base_url, api_key=key, max_retries=0) as late:
            with pytest.raises(openai.AuthenticationError):
                await late.models.list()

    gateway(tmp_path, ["one"], work)


def test_a_reward_is_posted_with_the_sessions_key_or_the_token_and_with_no_other(tmp_path):
    async def work(g, client, router, session):
        async with httpx.AsyncClient(timeout=10) as http, g.session() as other:
            made = (await http.post(f"{g.base_url}/sessions", headers={"authorization": f"Bearer {g.token}"})).json()
            assert made["base_url"] == g.base_url and made["key"].startswith("sk-mw-")

            async def post(key, body, id=session.id):
                url = f"{g.base_url}/sessions/{id}/reward"
                return (await http.post(url, json=body, headers={"authorization": f"Bearer {key}"})).status_code

            await client.chat.completions.create(model="any", messages=USER)
            with pytest.raises(EnvironmentFailed, match="no reward"):
                await session.scored(0.05)
            assert await post(other.key, {"reward": 1}) == 404
            assert await post(session.key, {"reward": "much"}) == 400
            assert await post(session.key, {}) == 400
            assert await post(session.key, {"reward": 0.5, "parts": {"style": 1}}) == 200
            assert await post(g.token, {"reward": 0.25, "parts": {"style": 2}}) == 200
            t = await session.scored(1.0)
            assert (t.reward, t.reward_parts) == (0.25, {"style": 2.0})

    gateway(tmp_path, ["one"], work)


def test_an_agent_of_somebody_else_is_an_environment_and_its_faults_are_told_apart(tmp_path):
    chat = chat_like("qwen3", tmp_path / "q")
    prompts = [Prompt(id=n, messages=USER, token_ids=[1]) for n in ("plain", "raises", "lost")]

    def agent(task, base_url, api_key):
        """As people write them: blocking, its own loop, its own retries."""
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = list(task.messages)
        for _ in range(2):
            try:
                said = client.chat.completions.create(model="gpt-4o", messages=messages)
            except openai.APIStatusError:
                return 0.0  # hides what happened
            messages += [said.choices[0].message, {"role": "user", "content": "more"}]
        if task.id == "raises":
            raise RuntimeError("the agent's own fault")
        return 1.0, {"turns": 2.0}

    async def run(fail):
        router = Scripted(chat, lambda text: "word")
        if fail:

            async def sample(*a, **k):
                raise PeerDied("rollout0", "died", "killed")

            router.sample = sample
        async with Gateway(router, chat) as g:
            return await sample_groups(
                g.environment(agent),
                prompts[:2] if not fail else prompts[2:],
                router,
                chat=chat,
                samples=2,
                sampling=Sampling(max_tokens=20),
                key="1",
            )

    good, bad = asyncio.run(run(False))
    assert (
        good.rewards == [1.0, 1.0]
        and not good.trajectories[0].segments
        and good.trajectories[0].reward_parts == {"turns": 2.0}
    )
    assert not bad.rewards and "agent's own fault" in bad.trajectories[0].dropped
    with pytest.raises(PeerDied):
        asyncio.run(run(True))
    assert threading.active_count() < 50


def test_a_caller_that_leaves_frees_its_engine(tmp_path):
    async def work(g, client, router, session):
        ended = asyncio.Event()

        async def sample(*a, **k):
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        router.sample = sample
        g.router = router
        session._threads._sample = sample
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(model="any", messages=USER)
        async with asyncio.timeout(5):
            await ended.wait()

    gateway(tmp_path, [], work)


def test_a_port_that_is_taken_is_said_so(tmp_path):
    async def work(g, client, router, session):
        with pytest.raises(MilkweedError, match="cannot listen"):
            await Gateway(router, g._chat, port=g.port).start()

    gateway(tmp_path, [], work)
