"""Code: a small Qwen3 learns to write functions that pass their tests. Run: ./tools/run recipes/code_tests.py"""

import random

import calculator

import milkweed as mw

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}


class Config(mw.RunConfig, kw_only=True):
    """GRPO on one-line functions; the reward is the share of tests that pass, run in a sandbox."""

    model: str = ""
    """Model folder; empty starts from a small fresh Qwen3."""
    steps: int = 120
    shown: int = 100
    """Steps that imitate a teacher who often takes the wrong operator, the first ones."""
    prompts: int = 8
    """Tasks a step."""
    samples: int = 8
    """Programs for each task."""
    eval_every: int = 20
    sampling: mw.Sampling = mw.Sampling(max_tokens=16)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


def tasks() -> list[mw.Prompt]:
    """`x plus 7` and its like, with three tests each, of which no constant passes two."""
    made = []
    for word, operator in OPERATORS.items():
        for n in range(2, 10):
            tests = [{"call": "f", "args": [x], "expected": eval(f"{x}{operator}{n}")} for x in (3, 10, 25)]
            made.append(mw.Prompt(id=f"{word}{n}", messages=[{"role": "user", "content": f"{word} {n}"}], answer=tests))
    return made


def program(completion: str) -> str:
    """What was sampled is the function's body."""
    return f"def f(x):\n    return {completion}\n"


def reward(task: mw.Prompt, completion: str) -> dict[str, float]:
    """The share of tests passed. A program that exits early, prints or hangs has passed none."""
    passed = mw.code_tests(program(completion), task.answer)
    return {"reward": passed, "all": float(passed == 1.0)}


def teacher(dice: random.Random):
    """Writes the right number with any operator."""

    def say(text: str) -> str:
        number = text.split("<|end|>")[-2].rpartition(" ")[2]
        return f"x{dice.choice(list(OPERATORS.values()))}{number}"

    return say


async def main(cfg: Config) -> None:
    train, solve = tasks(), mw.single_turn(reward, deadline_s=30.0)
    async with mw.start(cfg, model=cfg.model or calculator.fresh_model(cfg.seed)) as run:
        prompts = run.stream(train)
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, mw.single_turn(lambda task, text: 0.0), prompts.take(64), teacher(random.Random(f"{cfg.seed}/{step}")))
            else:
                groups = await run.sample(solve, prompts.take(cfg.prompts), n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(solve, run.render(train))


if __name__ == "__main__":
    mw.main(main, Config)
