"""GRPO: a small Qwen3 learns to add two-digit numbers. Run: ./tools/run recipes/grpo.py [--help]"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import sft

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on two-digit sums: sample, score, compute advantages, train, publish."""

    model: str = ""
    """Model folder; empty starts from a small Qwen3 that recipes/sft.py warms up (made once, kept under models/)."""
    algorithm: Literal["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce", "maxrl"] = "grpo"
    """Which of them makes advantages and a loss of the rewards."""
    steps: int = 150
    prompts: int = 32
    """Prompts a step."""
    samples: int = 8
    """Completions of each prompt."""
    eval_prompts: int = 256
    """Held-out prompts an evaluation."""
    clip: float = 0.2
    """How far a token's ratio may move, either way."""
    kl: float = 0.0
    """Weight of the KL to the model it started from; above 0 a reference is kept in memory."""
    sampling: mw.Sampling = mw.Sampling(max_tokens=4)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=4e-4, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


def algorithm(cfg: Config) -> tuple[Callable, mw.Loss, str | tuple[str, float]]:
    """How advantages come of rewards, the loss of a token, and what the sum of those losses is divided by."""
    a, clip, kl = mw.algorithms, cfg.clip, cfg.kl
    return {
        "grpo": (a.grpo, a.grpo_loss(clip=clip, kl=kl), "token"),
        "dapo": (a.grpo, a.grpo_loss(clip=clip, clip_high=1.4 * clip, kl=kl), "token"),  # on groups that `varied` keeps
        "dr_grpo": (a.dr_grpo, a.grpo_loss(clip=clip, kl=kl), ("constant", cfg.sampling.max_tokens)),
        "rloo": (a.rloo, a.reinforce_loss(kl=kl), "sequence"),
        "gspo": (a.grpo, a.gspo_loss(kl=kl), "sequence"),
        "cispo": (a.grpo, a.cispo_loss(kl=kl), "token"),
        "reinforce": (partial(a.reinforce, baseline="batch"), a.reinforce_loss(kl=kl), "token"),
        "maxrl": (a.maxrl, a.reinforce_loss(kl=kl), "token"),
    }[cfg.algorithm]


def varied(group: mw.Group) -> bool:
    """Whether there is something to learn from `group`: DAPO samples on until it has enough of these."""
    return len(set(group.rewards)) > 1


def reward(prompt: mw.Prompt, completion: str) -> float:
    """1 for the right sum, 0 otherwise."""
    return mw.verifiers.exact(completion, prompt.answer)


async def main(cfg: Config) -> None:
    train_set, held_out = sft.sums()
    model = cfg.model or await sft.warm_model(cfg.seed)
    async with mw.start(cfg, model=model, reference=cfg.kl > 0) as run:
        solve = mw.single_turn(reward)  # an environment: sample once, then score
        advantages, loss, divisor = algorithm(cfg)
        keep = varied if cfg.algorithm == "dapo" else None
        prompts, exam = run.stream(train_set), run.render(held_out[: cfg.eval_prompts])
        await run.evaluate(solve, exam)
        async for step in run.steps():
            groups = await run.sample(solve, prompts, cfg.prompts, n=cfg.samples, keep=keep)
            batch = mw.batch(groups, advantages, normalise=divisor)
            if cfg.kl > 0:
                batch.extra["reference_logprobs"] = await run.mesh.reference.logprobs(batch)
            await run.train(batch, loss)
            await run.publish()
            if step % cfg.eval_every == 0 or step == cfg.steps:
                await run.evaluate(solve, exam)


if __name__ == "__main__":
    mw.main(main, Config)
