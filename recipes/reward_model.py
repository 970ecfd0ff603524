"""A reward model from preferences: right sums above wrong ones. Run: ./tools/run recipes/reward_model.py"""

import random
from collections.abc import Sequence
from pathlib import Path

import sft

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """Bradley-Terry on pairs of answers to two-digit sums, for `recipes/ppo.py --reward-model`."""

    model: str = ""
    """Model folder to start from; empty takes the small Qwen3 that recipes/sft.py warms up."""
    out: str = ""
    """Where the reward model goes; default: `model` in the run's directory."""
    steps: int = 300
    pairs: int = 64
    """Pairs of answers a step."""
    eval_pairs: int = 256
    """Held-out pairs."""
    centre: float = 0.01
    """Holds scores around 0, so that those of different prompts compare."""
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


Pair = tuple[mw.Trajectory, mw.Trajectory]


def preferences(chat: mw.Chat, prompts: Sequence[mw.Prompt], seed: int) -> list[Pair]:
    """For each prompt the right answer, preferred to a wrong one as the careless teacher of recipes/sft.py gives them."""
    pairs = []
    for prompt in prompts:
        dice, wrong = random.Random(f"{seed}/{prompt.id}"), prompt.answer
        while wrong == prompt.answer:
            wrong = sft.smudge(prompt.answer, 0.35, dice)
        pairs.append((chat.supervised(prompt), chat.supervised(prompt, wrong)))
    return pairs


async def accuracy(model: mw.Trainer, batch: mw.Batch) -> float:
    """Share of the pairs whose preferred answer has the higher score."""
    scores = mw.algorithms.last_values(await model.values(batch), batch.mask, batch.segments)
    chosen, rejected, _ = mw.algorithms.pair_members(batch)
    return (scores[chosen] > scores[rejected]).float().mean().item()


async def train(cfg: Config, model: str | Path, out: str | Path = "") -> Path:
    """Train a reward model on `model` as its backbone; returns the folder of the result."""
    train_set, held_out = sft.sums()
    async with mw.start(cfg, model=model, roles=("trainer",), head="value") as run:
        chat, prompts = run.mesh.chat, run.stream(train_set)
        exam = mw.pack_pairs(preferences(chat, run.render(held_out[: cfg.eval_pairs]), cfg.seed))
        async for step in run.steps():
            batch = mw.pack_pairs(preferences(chat, prompts.take(cfg.pairs), cfg.seed))
            await run.train(batch, mw.algorithms.reward_model_loss(centre=cfg.centre))
            run.log()
            if step % cfg.eval_every == 0:
                run.note(held_out_accuracy=await accuracy(run.mesh.trainer, exam))
        return await run.mesh.trainer.export(out or run.directory.path / "model")


async def main(cfg: Config) -> None:
    print("reward model in", await train(cfg, cfg.model or await sft.warm_model(cfg.seed), cfg.out))


if __name__ == "__main__":
    mw.main(main, Config)
