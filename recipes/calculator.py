"""Tool use: a small Qwen3 learns to call a calculator. Run: ./tools/run recipes/calculator.py"""

import random
import re

import milkweed as mw

CALL = ('<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>')


class Config(mw.RunConfig, kw_only=True):
    """GRPO on products of two-digit numbers with a calculator at hand, after demonstrations."""

    model: str = ""
    """Model folder; empty starts from a small fresh Qwen3 and shows it what a call looks like."""
    steps: int = 225
    shown: int = 200
    """Steps that imitate demonstrations, the first ones."""
    calls: float = 0.3
    """Share of demonstrations that use the calculator; the others guess."""
    prompts: int = 16
    samples: int = 8
    eval_every: int = 25
    sampling: mw.Sampling = mw.Sampling(max_tokens=12)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=6e-4, warmup_steps=10, seq_len=256, micro_rows=64)


def calculate(expression: str) -> str:
    """The value of a product such as 12*34."""
    a, b = re.fullmatch(r"(\d+)\*(\d+)", expression).groups()
    return str(int(a) * int(b))


def reward(task: mw.Prompt, answer: str) -> float:
    """1 for the right product, 0 otherwise."""
    return mw.verifiers.exact(answer, task.answer)


def teacher(calls: float, dice: random.Random):
    """What a careless teacher says next: a call, what the calculator said, or a guess."""

    def say(text: str) -> str:
        role, last = text.split("<|end|>")[-2].rsplit("|>", 1)
        if role.endswith("tool"):
            return last
        return last.rstrip("=").join(CALL) if dice.random() < calls else str(dice.randint(100, 9801))

    return say


def fresh_model(seed: int = 0):
    """A Qwen3 of 0.7 million random weights whose tokenizer has the two ends of a call as tokens."""
    size = dict(hidden=192, layers=2, heads=6, kv_heads=3, head_dim=32, intermediate=384, tie_embeddings=True, context=256)
    return mw.cached_folder(f"models/caller-{seed}", lambda folder: mw.new_qwen3(folder, seed=seed, tokens=CALL, **size))


def products() -> mw.Split:
    return mw.split(mw.arithmetic(digits=2, low=10, operation="*", question="{a}*{b}="), held_out=0.1)


async def main(cfg: Config) -> None:
    data = products()
    solve = mw.tool_use(reward, [calculate], limits=mw.Limits(turns=2), announce=bool(cfg.model))
    async with mw.start(cfg, model=cfg.model or fresh_model(cfg.seed)) as run:
        prompts, exam = run.stream(data.train), run.render(data.held_out[:128])
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, solve, prompts.take(64), teacher(cfg.calls, random.Random(f"{cfg.seed}/{step}")))
            else:
                groups = await run.sample(solve, prompts.take(cfg.prompts), n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
                calls = [t.reward_parts["tool_calls"] for g in groups for t in g.scored]
                run.note(tool_calls=sum(calls) / len(calls))
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(solve, exam)


if __name__ == "__main__":
    mw.main(main, Config)
