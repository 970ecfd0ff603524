"""Tools with a process behind them: state, limits, what is left behind; and MCP servers."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
from chat_support import Scripted, chat_like

from milkweed.environments import python_tool, sandbox, shell_tool
from milkweed.environments.conversation import Conversation, Limits
from milkweed.environments.execution import CodeLimits
from milkweed.environments.mcp import McpServer
from milkweed.environments.session import Session
from milkweed.errors import EnvironmentFailed
from milkweed.runs.sampling import drops, sample_groups
from milkweed.types import Prompt, Sampling

LIMITS = CodeLimits(deadline_s=2.0, memory_bytes=256 << 20)


def session(*calls, limits=LIMITS):
    async def run():
        one = Session(limits)
        try:
            return [await one.run(kind, source) for kind, source in calls], one.isolation
        finally:
            await one.close()

    return asyncio.run(run())


def test_python_and_shell_keep_their_state_between_calls():
    out, _ = session(
        ("python", "x = 6\nx * 7"),
        ("python", "open('f', 'w').write(str(x)); print('ok')"),
        ("shell", "export A=5; mkdir d; cd d; cat ../f"),
        ("shell", "echo $A; basename $PWD; exit 3"),
        ("python", "1 / 0"),
        ("python", "x"),
    )
    assert out[:4] == ["42\n", "ok\n", "6", "5\nd\n(exit 3)\n"]
    assert "ZeroDivisionError" in out[4] and "session_main" not in out[4] and out[5] == "6\n"


@pytest.mark.parametrize(
    "kind, source, says",
    [
        ("python", "while True: pass", "longer than"),
        ("shell", "sleep 60", "longer than"),
        ("python", "print('x' * (1 << 30))", "MemoryError"),
        ("shell", "yes", "printed more"),
        ("python", "import os\nwhile True:\n    if os.fork() == 0:\n        import time; time.sleep(60)", ""),
        ("python", "import os; os._exit(0)", "the process ended"),
        ("python", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "longer than"),
        ("python", "a = bytearray(1 << 32)", "MemoryError"),
        ("python", "import sys; sys.exit(3)", "(exit 3)"),
    ],
)
def test_whatever_the_code_does_is_an_observation_in_time_and_nothing_is_left(kind, source, says):
    before = set(sandbox.descendants(os.getpid()))
    start = time.monotonic()
    out, _ = session((kind, source), ("python", "'alive'"))
    assert says in out[0] and out[1] == "'alive'\n"
    assert len(out[0]) < 2 << 20 and time.monotonic() - start < LIMITS.deadline_s + 6
    assert set(sandbox.descendants(os.getpid())) <= before


def test_a_session_that_is_closed_leaves_alone_the_one_that_has_got_its_descriptors():
    async def run():
        first, second = Session(LIMITS), Session(LIMITS)
        await first.run("python", "import os; os.kill(os.getpid(), 9)")
        held = [os.dup(0), os.dup(0)]
        try:
            asking = asyncio.create_task(second.run("python", "print('alive')"))
            while second._process is None:
                await asyncio.sleep(0)
            assert second._reply == first._out, "the number of the one's output is the other's for replies now"
            await first.close()
            return await asyncio.wait_for(asking, 10)
        finally:
            await second.close()
            for fd in held:
                os.close(fd)

    assert asyncio.run(run()) == "alive\n"


def test_nothing_is_written_outside_and_there_is_no_network(tmp_path):
    target = tmp_path / "outside"
    out, isolation = session(
        ("python", f"open({str(target)!r}, 'w').write('x')"),
        ("python", "import socket; socket.create_connection(('127.0.0.1', 9), 1)"),
    )
    if "files" in isolation:
        assert not target.exists() and "Error" in out[0]
    if "network" in isolation:
        assert "Error" in out[1]


def test_tools_of_one_trajectory_share_a_process_and_those_of_two_do_not(tmp_path):
    chat = chat_like("qwen3", tmp_path / "q", context=32768)

    def call(name, key, source):
        import json

        return f"<tool_call>{json.dumps({'name': name, 'arguments': {key: source}})}</tool_call>"

    lines = [call("python", "code", "open('f','w').write('hi'); None"), call("shell", "command", "cat f"), "done"]

    async def one():
        talk = Conversation(
            chat, Scripted(chat, lines).sample, [{"role": "user", "content": "go"}], sampling=Sampling(max_tokens=200),
            tools=[python_tool(LIMITS), shell_tool(LIMITS)],
        )  # fmt: skip
        try:
            async for reply in talk:
                await talk.run_tools(reply)
        finally:
            await talk.close()
        return [m["content"] for m in talk.messages if m["role"] == "tool"]

    async def two():
        return await asyncio.gather(one(), one())

    assert asyncio.run(two()) == [["", "hi"], ["", "hi"]]


ILLS = {
    "hang": "while True: pass",
    "die": "import os; os.kill(os.getpid(), 9)",
    "flood": "while True: print('x' * 1000000)",
    "fork": "import os\nwhile True: os.fork()",
    "outside": "open('/tmp/mw-outside-test', 'w').write('x')",
    "garbage": "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)",
    "well": "print(6 * 7)",
}


def test_a_step_with_ill_tools_ends_in_time_with_all_accounted_for(tmp_path):
    """MILKWEED_ILL_TOOLS=1000 makes it as many trajectories; it takes minutes then."""
    import json

    count = int(os.environ.get("MILKWEED_ILL_TOOLS", "56"))
    chat = chat_like("qwen3", tmp_path / "q", context=65536)
    limits = CodeLimits(deadline_s=3.0, memory_bytes=256 << 20)

    async def env(task, policy):
        talk = policy.talk(task.messages, tools=[python_tool(limits)], limits=Limits(turns=2))
        async for reply in talk:
            await talk.run_tools(reply)
        seen = [m["content"] for m in talk.messages if m["role"] == "tool"]
        return talk.trajectory(reward=float("42" in seen[0]))

    def lines(text):
        if "<tool_response>" in text:
            return "done"
        ill = text.split("ill:")[1].split("<")[0].strip()
        return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': ILLS[ill]}})}</tool_call>"

    names = list(ILLS)
    prompts = [
        Prompt(id=str(i), messages=[{"role": "user", "content": f"ill: {names[i % len(names)]}"}], token_ids=[1])
        for i in range(count)
    ]
    before = set(sandbox.descendants(os.getpid()))
    start = time.monotonic()
    deadline = 60.0 if count < 100 else 600.0
    groups = asyncio.run(
        sample_groups(
            env,
            prompts,
            Scripted(chat, lines),
            chat=chat,
            samples=1,
            sampling=Sampling(max_tokens=400),
            key="1",
            deadline_s=deadline,
        )
    )
    assert time.monotonic() - start < deadline + 10
    assert len(groups) == count and sum(drops(groups).values()) + sum(len(g.scored) for g in groups) == count
    assert not drops(groups), [t.dropped for g in groups for t in g.trajectories if t.dropped]
    wells = [g.rewards for g in groups if "well" in g.prompt.messages[0]["content"]]
    assert wells and all(r == [1.0] for r in wells)
    assert set(sandbox.descendants(os.getpid())) <= before
    assert not os.path.exists("/tmp/mw-outside-test") or "files" not in session(("python", "1"))[1]


SERVER = '''
import os, sys, time
from mcp.server.fastmcp import FastMCP

server = FastMCP("sums")
count = 0

@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

@server.tool()
def ills(kind: str) -> str:
    """Fails in many ways."""
    if kind == "raise":
        raise ValueError("no")
    if kind == "die":
        os._exit(1)
    time.sleep(60)

@server.tool()
def counted() -> int:
    """Counts calls."""
    global count
    count += 1
    return count

server.run()
'''


def test_an_mcp_server_gives_tools_and_its_faults_are_the_environments(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    async def run():
        async with McpServer([sys.executable, str(script)], deadline_s=15.0) as server:
            tools = {t.name: t for t in server.tools}
            assert set(tools) == {"add", "ills", "counted"} and tools["add"].parameters["required"] == ["a", "b"]
            assert await tools["add"].run({"a": 2, "b": 40}) == "42"
            assert "no" in await tools["ills"].run({"kind": "raise"})
            assert [await tools["counted"].run({}) for _ in range(2)] == ["1", "2"]
            with pytest.raises(EnvironmentFailed, match="ills failed"):
                await tools["ills"].run({"kind": "die"})
            assert await tools["counted"].run({}) == "1", "it is connected to anew"
            server.per_trajectory = True
            own = tools["counted"].session({})
            assert await own.run({}) == "1"
            await own.close()
        with pytest.raises(EnvironmentFailed, match="cannot be reached"):
            async with McpServer("no-such-command-anywhere", deadline_s=5.0):
                pass

    before = set(sandbox.descendants(os.getpid()))
    asyncio.run(run())
    assert set(sandbox.descendants(os.getpid())) <= before
