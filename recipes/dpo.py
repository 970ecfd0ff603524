"""DPO: a small Qwen3 learns from pairs of a right and a wrong sum. Run: ./tools/run recipes/dpo.py [--loss ipo]"""

from functools import partial
from pathlib import Path
from typing import Literal

import reward_model
import sft

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """Direct preference optimisation on two-digit sums; also IPO, ORPO and SimPO."""

    model: str = ""
    """Model folder to start from; empty takes the small Qwen3 that recipes/sft.py warms up."""
    out: str = ""
    """Where the trained model goes; default: `model` in the run's directory."""
    loss: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    beta: float = 0.1
    """How strongly the policy is held to the model it started from (ORPO, SimPO: weight of the preference)."""
    label_smoothing: float = 0.0
    """Share of preferences taken to be the wrong way round (cDPO)."""
    steps: int = 100
    pairs: int = 64
    """Pairs of answers a step."""
    eval_pairs: int = 256
    """Held-out pairs."""
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=2e-4, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


def preference_loss(cfg: Config) -> mw.Loss:
    a = mw.algorithms
    dpo = partial(a.dpo_loss, label_smoothing=cfg.label_smoothing)
    return {"dpo": dpo, "ipo": a.ipo_loss, "orpo": a.orpo_loss, "simpo": a.simpo_loss}[cfg.loss](beta=cfg.beta)


async def accuracy(policy: mw.Trainer, batch: mw.Batch) -> float:
    """Share of the pairs whose preferred answer gained more log-prob over the reference than the other did."""
    gain = await policy.logprobs(batch) - batch.extra["reference_logprobs"]
    gains = mw.algorithms.sequence_logprobs(gain, batch.mask, batch.segments)
    chosen, rejected, _ = mw.algorithms.pair_members(batch)
    return (gains[chosen] > gains[rejected]).float().mean().item()


async def train(cfg: Config, model: str | Path, out: str | Path = "") -> Path:
    """Train `model` on preferences; returns the folder of the result."""
    train_set, held_out = sft.sums()
    async with mw.start(cfg, model=model, roles=("trainer",), reference=True) as run:
        prompts, policy, reference = run.stream(train_set), run.mesh.trainer, run.mesh.reference

        async def packed(some: list[mw.Prompt]) -> mw.Batch:
            batch = mw.pack_pairs(reward_model.preferences(run.mesh.chat, some, cfg.seed))
            batch.extra["reference_logprobs"] = await reference.logprobs(batch)
            return batch

        exam = await packed(run.render(held_out[: cfg.eval_pairs]))
        async for step in run.steps():
            await run.train(await packed(prompts.take(cfg.pairs)), preference_loss(cfg))
            run.log()
            if step % cfg.eval_every == 0:
                run.note(held_out_accuracy=await accuracy(policy, exam))
        return await policy.export(out or run.directory.path / "model")


async def main(cfg: Config) -> None:
    print("model in", await train(cfg, cfg.model or await sft.warm_model(cfg.seed), cfg.out))


if __name__ == "__main__":
    mw.main(main, Config)
