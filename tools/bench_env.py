#!/usr/bin/env python3
"""What environments and the gateway cost the controller, with an engine that only waits.

    tools/bench_env.py [--json] [--trajectories 500] [--turns 4] [--turn-s 2.0]

trajectories_per_s    conversations of `turns` turns with a tool call each, all at once
controller_core       cores that they took of the controller
gateway_overhead_ms   what one call takes longer through the gateway than straight to the engine
gateway_over_engine   throughput of many callers through the gateway, over that of the engine alone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import milkweed as mw
from milkweed.types import Completion, PolicyVersion, VersionSpan

SAYS = '<tool_call>[{"name": "add", "arguments": {"a": 2, "b": 40}}]</tool_call>'
CALLERS = 64


class Waiting:
    """An engine of `slots` places that answers after `seconds`, whatever it was asked."""

    version = PolicyVersion()

    def __init__(self, chat: mw.Chat, seconds: float, slots: int) -> None:
        self.ids = [*chat.encode(SAYS), chat.eos_id]
        self.logprobs, self.seconds, self.room = [-0.5] * len(self.ids), seconds, asyncio.Semaphore(slots)

    async def sample(self, token_ids, sampling=None, **_) -> Completion:
        async with self.room:
            await asyncio.sleep(self.seconds)
        return Completion(
            prompt_ids=list(token_ids),
            token_ids=list(self.ids),
            logprobs=list(self.logprobs),
            finish_reason="stop",
            versions=[VersionSpan(0, len(self.ids), self.version)],
            sampling=sampling,
            text=SAYS,
        )


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def add_async(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def environments(chat: mw.Chat, count: int, turns: int, seconds: float) -> dict[str, float]:
    tool = mw.Tool("add", "Adds.", mw.tool(add).parameters, add_async)

    async def env(task, policy):
        talk = policy.talk(task.messages, tools=[tool], limits=mw.Limits(turns=turns))
        async for reply in talk:
            await talk.run_tools(reply)
        return talk.trajectory(1.0)

    prompts = chat.render(
        [mw.Prompt(id=str(i), messages=[{"role": "user", "content": f"sum {i}"}]) for i in range(count)]
    )
    router = Waiting(chat, seconds, count)
    wall, cpu = time.monotonic(), time.process_time()
    groups = await mw.sample_groups(
        env, prompts, router, chat=chat, samples=1, sampling=mw.Sampling(max_tokens=256), key="bench"
    )
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    assert all(len(g.scored) == 1 for g in groups)
    return {
        "trajectories_per_s": count / wall,
        "controller_core": cpu / wall,
        "cpu_ms_per_turn": cpu * 1e3 / (count * turns),
    }


async def gateway(chat: mw.Chat, seconds: float = 0.5, calls: int = 512) -> dict[str, float]:
    """The callers are a process of their own, as agents are."""
    messages = [{"role": "user", "content": "sum"}]
    router = Waiting(chat, 0.0, CALLERS)
    ids = chat.ids(messages)
    straight = []
    for _ in range(100):
        begin = time.perf_counter()
        await router.sample(ids, mw.Sampling())
        straight.append(time.perf_counter() - begin)

    async def through(router: Waiting, calls: int, callers: int) -> dict[str, float]:
        async with mw.Gateway(router, chat) as g, g.session() as s:
            command = [sys.executable, __file__, "--client", g.base_url, s.key, str(calls), str(callers)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            out, _ = await asyncio.wait_for(process.communicate(), 120)
            return json.loads(out)

    single = await through(router, 100, 1)
    begin = time.monotonic()
    engine = Waiting(chat, seconds, CALLERS)
    await asyncio.gather(*(engine.sample(ids, mw.Sampling()) for _ in range(calls)))
    bare = time.monotonic() - begin
    many = await through(Waiting(chat, seconds, CALLERS), calls, CALLERS)
    overhead = single["median_s"] - statistics.median(straight)
    return {"gateway_overhead_ms": overhead * 1e3, "gateway_over_engine": bare / many["wall_s"]}


async def client(base_url: str, key: str, calls: int, callers: int) -> None:
    """Bare sockets, so that the callers take little of the machine that is measured."""
    host, port = base_url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "sum"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    took: list[float] = []
    left = iter(range(calls))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in left:
            begin = time.perf_counter()
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 200"), answer
            await reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))
            took.append(time.perf_counter() - begin)
        writer.close()

    begin = time.monotonic()
    await asyncio.gather(*(caller() for _ in range(callers)))
    print(json.dumps({"wall_s": time.monotonic() - begin, "median_s": statistics.median(took)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line as JSON")
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-s", type=float, default=2.0, help="seconds that the engine takes for a turn")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        url, key, calls, callers = arguments.client
        asyncio.run(client(url, key, int(calls), int(callers)))
        return
    with tempfile.TemporaryDirectory() as folder:
        chat = mw.Chat(
            mw.new_qwen3(
                Path(folder) / "m", hidden=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate=16, context=4096
            )
        )

        async def both() -> dict[str, float]:
            first = await environments(chat, arguments.trajectories, arguments.turns, arguments.turn_s)
            return first | await gateway(chat)

        found = {k: round(v, 4) for k, v in asyncio.run(both()).items()}
    for name, value in found.items():
        print(f"{name:20} {value:10.3f}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
