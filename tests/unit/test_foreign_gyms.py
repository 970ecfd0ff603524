"""Gyms that bring their own client or server, run for real: verifiers and OpenEnv with their packages, NeMo Gym (which no
package index has) by its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal

import pytest
from chat_support import Scripted, chat_like
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from milkweed.environments.gyms import verifiers_env, verifiers_prompts
from milkweed.environments.servers import nemo_gym_env, nemo_gym_prompts, openenv_env
from milkweed.errors import ConfigError, DataError
from milkweed.rollout.gateway import Gateway
from milkweed.runs.sampling import sample_groups
from milkweed.types import Prompt, Sampling

SAMPLING = Sampling(max_tokens=128)


async def play(env, prompts, router, chat, **options):
    groups = await sample_groups(env, prompts, router, chat=chat, samples=1, sampling=SAMPLING, key="1", **options)
    return [g.trajectories[0] for g in groups]


@contextlib.asynccontextmanager
async def served(app):
    """The address of `app`, listening on this machine."""
    import uvicorn

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self):
            yield

    server = Quiet(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def test_an_environment_of_verifiers_samples_through_the_gateway_and_scores_with_its_rubric(tmp_path):
    vf = pytest.importorskip("verifiers", reason="an optional package")
    from datasets import Dataset

    class Doubling(vf.MultiTurnEnv):
        """Says how far off the last number was, twice at most."""

        async def env_response(self, messages, state, **kwargs):
            off = int(state["answer"]) - int(messages[-1]["content"])
            state["right"] = off == 0
            return [{"role": "user", "content": f"off by {off}"}]

        @vf.stop
        async def right(self, state):
            return state.get("right", False)

    def correct(completion, answer):
        return float(completion[-1]["content"] == answer)

    def turns(state):
        return len(state["trajectory"]) / 10

    def breaks(completion, answer):
        if answer == "7":
            raise KeyError("no such answer")
        return 0.0

    def make():
        rows = [{"question": f"which number? {n}", "answer": str(n)} for n in (5, 7)]
        rubric = vf.Rubric(funcs=[correct, turns, breaks], weights=[1.0, 0.5, 1.0])
        return Doubling(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=2, system_prompt="Guess.")

    chat = chat_like("smollm2", tmp_path / "s")
    router = Scripted(chat, lambda text: "5" if "off by" in text else "4")

    async def run():
        async with Gateway(router, chat, sampling=SAMPLING) as gateway:
            env = verifiers_env(made := make(), gateway)
            prompts = verifiers_prompts(made)
            assert [p.messages[0]["content"] for p in prompts] == ["Guess.", "Guess."]
            return await play(env, prompts, router, chat)

    before = signal.getsignal(signal.SIGINT)
    try:
        right, broken = asyncio.run(run())
        assert right.reward == pytest.approx(1.1) and right.reward_parts == {"correct": 1.0, "turns": 0.2, "breaks": 0.0}
        said = [chat.decode(right.token_ids[t.start : t.end]) for t in right.turns if t.role == "assistant"]
        assert [s.split("<")[0] for s in said] == ["4", "5"] and sum(right.loss_mask) == right.sampled == 4
        assert broken.reward is None and "KeyError: 'no such answer' (prompt 1)" in broken.dropped, "not a zero"
        signal.signal(signal.SIGINT, before)
        verifiers_prompts(make)
        assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C stays the controller's"

        def whole_group(completions, answers):
            return [0.0 for _ in answers]

        with pytest.raises(ConfigError, match="a whole group"):
            (group := make()).rubric.add_reward_func(whole_group)
            verifiers_env(group, None)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_openenv_server_is_played_over_its_sessions(tmp_path):
    pytest.importorskip("openenv", reason="an optional package")
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        number: int

    class Seen(Observation):
        hint: str = ""

    class Numbers(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.secret, self.steps = seed, 0
            return Seen(hint="guess", done=False, reward=None)

        def step(self, action, timeout_s=None, **kwargs):
            self.steps += 1
            if action.number == 13:
                raise RuntimeError("bad luck")
            right = action.number == self.secret
            hint = "right" if right else "higher" if action.number < self.secret else "lower"
            return Seen(hint=hint, done=right or self.steps == 8, reward=float(right))

        @property
        def state(self):
            return State(step_count=self.steps)

    chat = chat_like("smollm2", tmp_path / "s")

    def lines(text):
        last = text.split("user\n")[-1]
        if "unlucky" in text:
            return '{"number": 13}'
        guessed = text.count('{"number"')
        if "guess" in last:
            return "I say five"  # no action at all
        if "error" in last and "valid" not in last and "number" not in last:
            return '{"numbr": 1}'  # the server finds it malformed
        return json.dumps({"number": 2 + guessed})

    def action(text):
        return json.loads(text)

    prompts = [
        Prompt(id="a", messages=[{"role": "user", "content": "play"}], info={"seed": 4}),
        Prompt(id="b", messages=[{"role": "user", "content": "unlucky"}], info={"seed": 2}),
    ]

    async def run():
        async with served(create_fastapi_app(Numbers, Guess, Seen, max_concurrent_envs=8)) as url:
            env = openenv_env(url, action=action, describe=lambda o: o["hint"])
            good, bad = await play(env, prompts, Scripted(chat, lines), chat, deadline_s=30.0)
            gone = url.rsplit(":", 1)[0] + ":1"
            (lost,) = await play(openenv_env(gone), prompts[:1], Scripted(chat, lines), chat)
            return good, bad, lost

    good, bad, lost = asyncio.run(run())
    assert good.reward == 1.0 and good.reward_parts == {"done": 1.0}, good
    assert "I say five" in good.completion and "Field required" in good.completion, "both are told to the policy"
    assert bad.reward is None and "bad luck" in bad.dropped and bad.dropped.startswith("EnvironmentFailed")
    assert lost.reward is None and "EnvironmentFailed" in lost.dropped


def test_a_nemo_gym_resources_server_seeds_serves_tools_and_verifies(tmp_path):
    app, sessions, verified = FastAPI(), {}, []

    @app.post("/seed_session")
    async def seed(request: Request):
        body, key = await request.json(), f"s{len(sessions)}"
        sessions[key] = {"want": body["want"], "count": 0}
        answer = JSONResponse({})
        answer.set_cookie("session", key)
        return answer

    @app.post("/add")
    async def add(request: Request):
        session, body = sessions[request.cookies["session"]], await request.json()
        if "by" not in body or body["by"] > 9:
            raise HTTPException(422, "by must be at most 9")
        session["count"] += body["by"]
        return {"count": session["count"]}

    @app.post("/verify")
    async def verify(request: Request):
        session, body = sessions[request.cookies["session"]], await request.json()
        verified.append(body)
        if session["want"] < 0:
            raise HTTPException(500, "cannot say")
        return body | {"reward": float(session["count"] == session["want"])}

    tool = {
        "type": "function",
        "name": "add",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    }
    rows = [
        {"responses_create_params": {"input": [{"role": "user", "content": f"count to {n}"}], "tools": [tool]}, "want": n}
        for n in (3, -1)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = nemo_gym_prompts(tmp_path / "rows.jsonl")
    chat = chat_like("qwen3", tmp_path / "q")

    def lines(text):
        def call(by):
            return f'<tool_call>{{"name": "add", "arguments": {{"by": {by}}}}}</tool_call>'

        return call(10) if "<tool_response>" not in text else call(3) if '"count"' not in text else "done"

    async def run():
        async with served(app) as url:
            return await play(nemo_gym_env(url), prompts, Scripted(chat, lines), chat)

    right, unsure = asyncio.run(run())
    assert right.reward == 1.0 and "by must be at most 9" in right.completion
    kinds = [item["type"] for item in verified[0]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert verified[0]["response"]["output"][-1]["content"][0]["text"] == "done"
    assert unsure.reward is None and "cannot say" in unsure.dropped
    (tmp_path / "bad.jsonl").write_text('{"a": 1}')
    with pytest.raises(DataError, match="line 1"):
        nemo_gym_prompts(tmp_path / "bad.jsonl")
