"""PPO: policy, critic, and a verified or a learned reward. Run: ./tools/run recipes/ppo.py [--reward-model FOLDER]"""

from dataclasses import replace

import grpo
import sft

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """PPO on two-digit sums: sample, score, estimate advantages with the critic, train both, publish."""

    model: str = ""
    """Model folder; empty starts from the small Qwen3 that recipes/sft.py warms up."""
    reward_model: str = ""
    """Folder that recipes/reward_model.py made, whose score is the reward; empty: the sum is checked."""
    steps: int = 100
    prompts: int = 64
    """Prompts a batch."""
    samples: int = 2
    """Completions of each prompt."""
    updates: int = 2
    """Optimiser steps on each batch, of the policy and of the critic."""
    critic_first: int = 10
    """The critic's steps on the first batch before the policy moves: one that knows nothing is a poor baseline."""
    eval_prompts: int = 256
    """Held-out prompts an evaluation; there the sum is always checked."""
    clip: float = 0.2
    """How far a token's ratio, and a value, may move either way in one batch."""
    trace: float = 0.95
    """GAE's lambda."""
    kl: float = 0.0
    """KL penalty to the first model, in the reward; a learned reward needs it (0.1), or its faults are learnt."""
    sampling: mw.Sampling = mw.Sampling(max_tokens=4)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=4e-4, warmup_steps=4, decay="linear", seq_len=256, micro_rows=64)
    critic: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=4, seq_len=256, micro_rows=64)


async def estimate(cfg: Config, mesh: mw.Mesh, batch: mw.Batch) -> mw.Batch:
    """`batch`, whose advantages are the verified rewards so far, with GAE's advantages and the critic's targets."""
    a, mask, segments = mw.algorithms, batch.mask, batch.segments
    outcomes = a.segment_mean(batch.advantages, mask, segments)
    if mesh.reward_model is not None:  # its score as the chance to be preferred to a middling answer
        outcomes = a.last_values(await mesh.reward_model.values(batch), mask, segments).sigmoid()
    old = await mesh.reference.logprobs(batch) if mesh.reference is not None else batch.logprobs
    rewards = a.kl_in_reward(outcomes, batch.logprobs, old, mask, coefficient=cfg.kl, segments=segments)
    values = a.values_before(await mesh.critic.values(batch), segments)
    advantages, returns = a.gae(rewards, values, mask, trace=cfg.trace, segments=segments)
    return replace(batch, advantages=a.whiten(advantages, mask), extra={"values": values, "returns": returns})


async def train(cfg: Config, model: str) -> str:
    """Train `model` against the reward that `cfg` names; returns the folder of the result."""
    train_set, held_out = sft.sums()
    models = {"critic": cfg.critic, "reward_model": cfg.reward_model or None, "reference": cfg.kl > 0}
    async with mw.start(cfg, model=model, **models) as run:
        solve, a = mw.single_turn(grpo.reward), mw.algorithms
        prompts, exam = run.stream(train_set), run.render(held_out[: cfg.eval_prompts])
        await run.evaluate(solve, exam)
        async for _ in run.steps():
            sampled = mw.batch(await run.sample(solve, prompts.take(cfg.prompts), n=cfg.samples), a.reinforce)
            for _ in range(0 if run.step else cfg.critic_first):
                await run.train(await estimate(cfg, run.mesh, sampled), a.value_loss(clip=None), role="critic")
            batch = await estimate(cfg, run.mesh, sampled)
            for _ in range(cfg.updates):
                await run.train(batch, a.ppo_loss(clip=cfg.clip))
                await run.train(batch, a.value_loss(clip=cfg.clip), role="critic")
            await run.publish()
            if run.step % cfg.eval_every == 0:
                await run.evaluate(solve, exam)
        return str(await run.mesh.trainer.export(run.directory.path / "model"))


async def main(cfg: Config) -> None:
    print("model in", await train(cfg, cfg.model or str(await sft.warm_model(cfg.seed))))


if __name__ == "__main__":
    mw.main(main, Config)
