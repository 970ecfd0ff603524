"""Gyms behind a server, by what they speak on the wire: OpenEnv (WebSocket) and NeMo Gym (HTTP). Neither package is
needed here, only on the server's side. What the server does wrong is EnvironmentFailed: tried again, never a zero."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from milkweed.environments.classes import from_gym
from milkweed.environments.conversation import Conversation, Limits
from milkweed.environments.tools import Tool
from milkweed.errors import ConfigError, DataError, EnvironmentFailed
from milkweed.types import Environment, Prompt, Trajectory

OPENENV_SEES = ("seed", "episode_id")
"""What of a task's `info` an OpenEnv reset is given, where `reset` does not say."""


@contextlib.contextmanager
def _blamed_on(url: str) -> Any:
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentFailed(f"{url}: {type(error).__name__}: {error}") from error
    except TimeoutError:
        raise EnvironmentFailed(f"{url} did not answer in time") from None


def openenv_env(
    url: str,
    *,
    action: Callable[[str], dict[str, Any]] = json.loads,
    describe: Callable[[Any], str] = json.dumps,
    reset: Callable[[Prompt], dict[str, Any]] | None = None,
    deadline_s: float = 60.0,
    **options: Any,
) -> Environment:
    """The OpenEnv environment served at `url` (`http://host:port`); each trajectory has a session of its own.

    `action` makes the fields of the action from what the policy said (ValueError for what is none), `describe` writes
    an observation (a dict) down, `reset` says what the reset is given (default: `seed` and `episode_id` of the task's
    `info`). An action that the server finds malformed is told to the policy. The server has `deadline_s` for an answer;
    one that is gone, late, full or raises is EnvironmentFailed. `options` are those of `from_gym`."""
    address = url.rstrip("/").replace("http", "ws", 1) + "/ws" if url.startswith("http") else ""
    if not address:
        raise ConfigError(f"openenv_env: {url!r} is no address; give http://host:port")

    class Adapter:
        def __init__(self) -> None:
            self.http: Any = None

        async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
            with _blamed_on(url):
                async with asyncio.timeout(deadline_s):
                    await self.ws.send_json({"type": kind, "data": data})
                    answer = await self.ws.receive_json()
                return {"type": answer["type"], **answer["data"]}

        async def reset(self, task: Prompt) -> str:
            import aiohttp

            self.http = aiohttp.ClientSession()
            with _blamed_on(url):
                async with asyncio.timeout(deadline_s):
                    self.ws = await self.http.ws_connect(address, max_msg_size=64 << 20)
            asked = reset(task) if reset else {k: task.info[k] for k in OPENENV_SEES if k in task.info}
            answer = await self._ask("reset", asked)
            return describe(self._observation(answer))

        async def step(self, move: dict[str, Any]) -> tuple[str, float, bool]:
            answer = await self._ask("step", move)
            if answer.get("code") == "VALIDATION_ERROR":
                return f"error: {answer.get('errors') or answer['message']}", 0.0, False
            seen = self._observation(answer)
            return describe(seen), float(answer.get("reward") or 0.0), bool(answer.get("done"))

        def _observation(self, answer: dict[str, Any]) -> Any:
            if answer["type"] != "observation":
                raise EnvironmentFailed(f"{url}: {answer.get('code', answer['type'])}: {answer.get('message', '')}")
            return answer.get("observation", {})

        async def close(self) -> None:
            if self.http is not None:
                await self.http.close()

    Adapter.__name__ = f"openenv {url}"
    return from_gym(Adapter, action=action, **options)


def nemo_gym_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a NeMo Gym data set (JSON lines with `responses_create_params`), each row kept whole in `info`. Raises
    DataError naming the line that is none."""
    prompts = []
    for number, line in enumerate(Path(path).read_text().splitlines()):
        try:
            row = json.loads(line)
            asked = row["responses_create_params"]["input"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number + 1}: no row of NeMo Gym ({error})") from error
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [_chat_message(m) for m in asked]
        prompts.append(Prompt(id=str(row.get("id", number)), messages=messages, info=row))
    return prompts


def _chat_message(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    role = "system" if item.get("role") == "developer" else item.get("role", "user")
    return {"role": role, "content": content or ""}


def nemo_gym_env(url: str, *, limits: Limits | None = None, deadline_s: float = 60.0, **options: Any) -> Environment:
    """The tasks of the NeMo Gym resources server at `url`, played by the policy: `/seed_session`, its tools as the row
    lists them, and `/verify` for the reward, within one session (cookies). Prompts are those of `nemo_gym_prompts`.

    What a tool answers, errors included, is told to the policy, as in NeMo Gym's own agent. A server that is gone or late
    (`deadline_s`), or a `/verify` that fails, is EnvironmentFailed. `options` are those of `policy.talk`."""
    base = url.rstrip("/")

    async def environment(prompt: Prompt, policy: Any) -> Trajectory:
        asked = prompt.info.get("responses_create_params")
        if asked is None:
            raise DataError(f"prompt {prompt.id} is not of NeMo Gym: make prompts with nemo_gym_prompts")
        async with _session(base, deadline_s) as http:
            await _post(http, f"{base}/seed_session", prompt.info)
            tools = [_remote(http, base, schema) for schema in asked.get("tools") or () if schema.get("type") == "function"]
            talk: Conversation = policy.talk(prompt.messages, tools=tools, limits=limits or Limits(turns=8), **options)
            async for reply in talk:
                await talk.run_tools(reply)
            trajectory = talk.trajectory()
            if trajectory.dropped is None:
                response = _response(talk.messages[len(prompt.messages) :], asked)
                answer = await _post(http, f"{base}/verify", prompt.info | {"response": response})
                with _blamed_on(base):
                    trajectory.reward = float(answer["reward"])
                    parts = answer.get("reward_components") or {}
                    trajectory.reward_parts = {k: float(v) for k, v in parts.items()}
            return trajectory

    environment.__name__ = environment.__qualname__ = f"nemo_gym({base})"
    return environment


@contextlib.asynccontextmanager
async def _session(base: str, deadline_s: float) -> AsyncIterator[Any]:
    import aiohttp

    # the session is a cookie, and servers are addressed by number
    jar, limit = aiohttp.CookieJar(unsafe=True), aiohttp.ClientTimeout(total=deadline_s)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=limit) as http:
        yield http


async def _post(http: Any, url: str, body: dict[str, Any]) -> dict[str, Any]:
    with _blamed_on(url):
        async with http.post(url, json=body) as answer:
            if answer.status != 200:
                raise EnvironmentFailed(f"{url}: {answer.status}: {(await answer.text())[:300]}")
            return dict(await answer.json())


def _remote(http: Any, base: str, schema: dict[str, Any]) -> Tool:
    name = schema["name"]

    async def call(**arguments: Any) -> str:
        with _blamed_on(f"{base}/{name}"):
            async with http.post(f"{base}/{name}", json=arguments) as answer:
                return str(await answer.text())

    return Tool(name, schema.get("description") or "", schema.get("parameters"), call, deadline_s=None)


def _response(messages: Sequence[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """What was said, in the form of OpenAI's Responses API."""
    output: list[dict[str, Any]] = []
    for number, m in enumerate(messages):
        if m["role"] == "tool" and "tool_call_id" in m:
            output.append({"type": "function_call_output", "call_id": m["tool_call_id"], "output": m["content"]})
            continue
        if m["role"] != "assistant":
            output.append({"type": "message", "role": "user", "content": m["content"]})
            continue
        calls = m.get("tool_calls") or ()
        if m["content"] or not calls:
            text = {"type": "output_text", "text": m["content"], "annotations": []}
            about = {"id": f"msg_{number}", "role": "assistant", "status": "completed", "type": "message"}
            output.append(about | {"content": [text]})
        for c in calls:
            item = {"type": "function_call", "call_id": c["id"], "id": c["id"], "status": "completed"}
            output.append(item | {"name": c["function"]["name"], "arguments": c["function"]["arguments"]})
    about = {"id": "resp", "created_at": 0.0, "model": "policy", "object": "response", "tool_choice": "auto"}
    return about | {"parallel_tool_calls": True, "tools": asked.get("tools") or [], "output": output}
