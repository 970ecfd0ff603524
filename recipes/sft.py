"""Supervised fine-tuning: a fresh small Qwen3 learns two-digit sums from examples. Run: ./tools/run recipes/sft.py"""

import random
from pathlib import Path

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """Supervised fine-tuning on two-digit sums, from a fresh small Qwen3 or a model folder."""

    model: str = ""
    """Model folder to start from; empty builds a fresh Qwen3."""
    out: str = ""
    """Where the trained model goes; default: `model` in the run's directory."""
    steps: int = 600
    batch: int = 128
    """Examples a step."""
    learnt: float = 0.0
    """Loss of a token at which the task counts as learnt; from then on the examples are careless."""
    careless_steps: int = 100
    """Steps with careless examples; the last."""
    wrong_digits: float = 0.35
    """Share of a careless answer's digits that are random."""
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=20, seq_len=256, micro_rows=64)


def sums() -> mw.Split:
    """Every sum of two-digit numbers once; a fifth is held out, and with a + b always b + a too."""
    return mw.split(mw.arithmetic(digits=2, low=10, question="{a}+{b}=", answer="{value:03d}"), held_out=0.2)


def smudge(answer: str, share: float, dice: random.Random) -> str:
    """`answer` with `share` of its digits replaced by random ones."""
    return "".join(dice.choice("0123456789") if dice.random() < share else digit for digit in answer)


async def train(cfg: Config, model: str | Path, out: str | Path = "") -> Path:
    """Fine-tune `model` on the training sums; returns the folder of the result."""
    train_set, held_out = sums()
    async with mw.start(cfg, model=model, roles=("trainer",)) as run:
        chat, examples = run.mesh.chat, run.stream(train_set)
        test = mw.pack([chat.supervised(p) for p in run.render(held_out[:256])])
        async for step in run.steps():
            dice = random.Random(f"{cfg.seed}/{step}")
            wrong = cfg.wrong_digits if "learnt_at" in run.state else 0.0
            batch = mw.pack([chat.supervised(p, smudge(p.answer, wrong, dice)) for p in examples.take(cfg.batch)])
            metrics = await run.train(batch, mw.algorithms.sft_loss())
            run.log()
            if step % cfg.eval_every == 0:
                logprobs = await run.mesh.trainer.logprobs(test)
                run.note(held_out_loss=-(logprobs * test.weights).sum().item())
            if metrics["loss"] < cfg.learnt:
                run.state.setdefault("learnt_at", step)
            if step == run.state.get("learnt_at", cfg.steps) + cfg.careless_steps:
                break
        return await run.mesh.trainer.export(out or run.directory.path / "model")


def fresh_model(seed: int = 0) -> Path:
    """A Qwen3 of 1.6 million random weights, made once for each seed."""
    size = dict(hidden=256, layers=2, heads=8, kv_heads=4, head_dim=32, intermediate=768, tie_embeddings=True)
    return mw.cached_folder(f"models/fresh-{seed}", lambda folder: mw.new_qwen3(folder, seed=seed, **size))


async def warm_model(seed: int = 0) -> Path:
    """Where the default job starts: a fresh Qwen3 that has learnt to add, and then how sure to be from a careless teacher
    who gets every third digit wrong. What it says is right about one time in four. Made once, kept under models/."""
    out = Path(f"models/sums-{seed}")
    if not (out / "config.json").exists():
        await train(Config(learnt=0.12, seed=seed, eval_every=50, run_dir=f"{out}.run"), fresh_model(seed), out)
    return out


async def main(cfg: Config) -> None:
    print("model in", await train(cfg, cfg.model or fresh_model(cfg.seed), cfg.out))


if __name__ == "__main__":
    mw.main(main, Config)
