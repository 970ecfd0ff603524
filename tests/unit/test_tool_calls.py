"""Calls of tools: what is one, what the policy did wrong, what the tool did wrong."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from chat_support import USER, Scripted, chat_like, check_exact, play, through, times

from milkweed.environments.tool_calls import check_arguments, parse
from milkweed.environments.tools import Tool, as_tools, tool
from milkweed.errors import ConfigError, EnvironmentFailed
from milkweed.runs.sampling import sample_groups
from milkweed.types import Prompt, Sampling

BROKEN = {
    "qwen3": ["<tool_call>{}</tool_call>", '<tool_call>{"name": "times", "arguments": {"a": 1}', "<tool_call>[]</tool_call>",
              '<tool_call>{"name": "times", "arguments": "{}"}</tool_call>', '</tool_call>', '<tool_call>{"name": "t", "name": "t", "arguments": {}}</tool_call>',
              '<tool_call>{"name": "t", "arguments": {"a": NaN}}</tool_call>', '<tool_call>' + "[" * 100000 + '</tool_call>',
              '<tool_call>{"name": "t", "arguments": {}, "extra": 1}</tool_call>', '<tool_call><tool_call>{}</tool_call>'],
    "llama3": ['{"name": "times", "parameters": {"a": 1}', '{"name": "times", "arguments": {}}', "<|python_tag|>print(1)",
               '{"name": "times", "parameters": {}} and so', "<|python_tag|>"],
    "smollm2": ["<tool_call>{}</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>[", '<tool_call>[{"name": 1, "arguments": {}}]</tool_call>'],
}  # fmt: skip


@pytest.mark.parametrize("form", sorted(BROKEN))
def test_a_malformed_call_is_an_error_and_no_call(form):
    for text in BROKEN[form]:
        parsed = parse(text, {"qwen3": "hermes"}.get(form, form))
        assert parsed.errors and not parsed.calls and parsed.content == text, text[:60]
    for text in ("", "plain", '{"a": 1}', "{"):
        parsed = parse(text, {"qwen3": "hermes"}.get(form, form))
        assert not parsed.errors and not parsed.calls and parsed.content == text


def test_calls_in_thoughts_are_not_carried_out():
    call = '<tool_call>{"name": "t", "arguments": {}}</tool_call>'
    assert not parse(f"<think>{call}", "hermes").calls
    parsed = parse(f"<think>{call}</think>now {call}", "hermes")
    assert len(parsed.calls) == 1 and parsed.content == f"<think>{call}</think>now "


def test_what_the_policy_did_wrong_is_an_observation(tmp_path):
    chat = chat_like("qwen3", tmp_path / "q", context=32768)

    def call(name, arguments):
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    def boom(x: str) -> str:
        raise KeyError(x)

    async def slow() -> str:
        await asyncio.sleep(30)
        return ""

    async def flood() -> str:
        return "x" * 100_000

    tools = [times, boom, tool(slow, deadline_s=0.05), flood]
    said = [
        (call("divide", "{}"), "there is no tool 'divide'"),
        (call("times", '{"a": 1}'), "b is missing"),
        (call("times", '{"a": 1, "b": "2"}'), "b must be integer, not string"),
        (call("times", '{"a": 1, "b": true}'), "b must be integer, not boolean"),
        (call("times", '{"a": 1, "b": 2, "c": 3}'), "there is no c"),
        (call("boom", '{"x": "k"}'), "KeyError"),
        (call("slow", "{}"), "longer than"),
        (call("flood", "{}"), "left out"),
        ("<tool_call>oops</tool_call>", "not JSON"),
    ]
    t, talk, router = play(chat, [s for s, _ in said] + ["end"], through, tools=tools)
    seen = [m["content"] for m in talk.messages if m["role"] == "tool"]
    assert len(seen) == len(said) and all(want in got for (_, want), got in zip(said, seen, strict=True))
    assert max(map(len, seen)) < 9000
    check_exact(t, router, chat)


def test_a_broken_tool_is_the_environments_fault_and_tried_again(tmp_path):
    chat = chat_like("qwen3", tmp_path / "q")
    prompt = Prompt(id="p", messages=USER, token_ids=chat.ids(USER))
    tried = []

    def broken() -> str:
        tried.append(1)
        if len(tried) < 2:
            raise EnvironmentFailed("the tool's server is gone")
        return "ok"

    async def env(task, policy):
        return await through(policy.talk(task.messages, tools=[broken]))

    def lines(text):
        return "fine" if "<tool_response>\nok" in text else '<tool_call>{"name": "broken", "arguments": {}}</tool_call>'

    async def run(retries):
        return await sample_groups(
            env,
            [prompt],
            Scripted(chat, lines),
            chat=chat,
            samples=1,
            sampling=Sampling(max_tokens=200),
            key="1",
            retries=retries,
        )

    (group,) = asyncio.run(run(1))
    assert group.rewards == [1.0] and len(tried) == 2
    tried.clear()
    (group,) = asyncio.run(run(0))
    assert group.trajectories[0].dropped.startswith("EnvironmentFailed") and not group.rewards


def test_a_function_becomes_a_tool_by_its_signature():
    def look(what: str, kind: Literal["a", "b"] = "a", most: int | None = None, tags: list[str] = []) -> str:  # noqa: B006
        """Looks."""
        return what

    (made,) = as_tools([look])
    about = made.schema["function"]
    assert about["name"] == "look" and about["description"] == "Looks." and about["parameters"]["required"] == ["what"]
    for good in ({"what": "x"}, {"what": "x", "most": None, "tags": ["t"]}, {"what": "x", "kind": "b", "most": 3.0}):
        assert check_arguments(good, made.parameters) is None
    for bad in ({}, {"what": 1}, {"what": "x", "kind": "c"}, {"what": "x", "tags": [1]}, {"what": "x", "most": "1"}):
        assert check_arguments(bad, made.parameters)
    with pytest.raises(ConfigError, match="JSON cannot carry"):
        tool(lambda_with_bytes)
    with pytest.raises(ConfigError, match="two tools"):
        as_tools([look, Tool("look")])


def lambda_with_bytes(x: bytes) -> str:
    return ""
