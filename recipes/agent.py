"""Somebody else's agent, written for the `openai` client, trained as it is through the gateway.
Run: ./tools/run recipes/agent.py"""

import json
import random

import calculator
import openai

import milkweed as mw

TOOLS = [mw.tool(calculator.calculate).schema]


class Config(calculator.Config, kw_only=True):
    """GRPO on products, with an agent loop that knows nothing of training."""


def agent(question: str, base_url: str, api_key: str) -> str:
    """An agent loop as people write it: ask, run the tools that are called, ask again."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        message = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS, temperature=0.2).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            try:
                value = calculator.calculate(**json.loads(call.function.arguments))
            except (AttributeError, TypeError, ValueError) as error:
                value = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return message.content or ""


def scored(task: mw.Prompt, base_url: str, api_key: str) -> float:
    """The agent's answer to a task, judged."""
    return calculator.reward(task, agent(task.text, base_url, api_key))


async def main(cfg: Config) -> None:
    data = calculator.products()
    async with (
        mw.start(cfg, model=cfg.model or calculator.fresh_model(cfg.seed)) as run,
        mw.Gateway(run.mesh.rollout, run.mesh.chat, announce=bool(cfg.model)) as gateway,
    ):
        solve = gateway.environment(scored)
        prompts, exam = run.stream(data.train), run.render(data.held_out[:32])
        show = mw.tool_use(calculator.reward, [calculator.calculate], limits=mw.Limits(turns=2), announce=bool(cfg.model))
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, show, prompts.take(64), calculator.teacher(cfg.calls, random.Random(f"{cfg.seed}/{step}")))
            else:
                groups = await run.sample(solve, prompts.take(cfg.prompts), n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(solve, exam)


if __name__ == "__main__":
    mw.main(main, Config)
