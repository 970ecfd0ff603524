"""Supervised fine-tuning: a fresh small Qwen3 learns the form of two-digit sums. Run: ./tools/run recipes/sft.py"""

from pathlib import Path

import msgspec

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """Supervised fine-tuning on two-digit sums, from a fresh small Qwen3 or a model folder."""

    model: str = ""
    """Model folder to start from; empty builds a fresh Qwen3."""
    out: str = ""
    """Where the trained model goes; default: `model` in the run's directory."""
    steps: int = 300
    batch: int = 128
    """Examples a step."""
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=2e-3, warmup_steps=20, seq_len=256, micro_rows=64)


def sums(seed: int = 0) -> mw.Split:
    """Every two-digit sum once; a tenth is held out, and with a + b always b + a too."""
    return mw.split(mw.arithmetic(digits=2, low=10, question="{a}+{b}=", seed=seed), held_out=0.1)


async def train(cfg: Config, model: str | Path, out: str | Path = "") -> Path:
    """Fine-tune `model` on the training sums; returns the folder of the result."""
    train_set, held_out = sums()
    async with mw.start(cfg, model=model, roles=("trainer",)) as run:
        examples = run.stream(train_set)
        test = mw.pack([run.mesh.chat.supervised(p) for p in run.render(held_out[:256])])
        async for step in run.steps():
            batch = mw.pack([run.mesh.chat.supervised(p) for p in examples.take(cfg.batch)])
            await run.train(batch, mw.algorithms.sft_loss())
            run.log()
            if step % cfg.eval_every == 0:
                logprobs = await run.mesh.trainer.logprobs(test)
                run.note(held_out_loss=-(logprobs * test.weights).sum().item())
        return await run.mesh.trainer.export(out or run.directory.path / "model")


async def warm_model(seed: int = 0, steps: int = 300) -> Path:
    """The default job's start: a fresh Qwen3 that has seen a little of the task. Made once, then found under models/."""
    out = Path(f"models/sums-{seed}-{steps}")
    if not (out / "config.json").exists():
        fresh = mw.cached_folder(f"models/fresh-{seed}", lambda folder: mw.new_qwen3(folder, seed=seed))
        await train(Config(steps=steps, seed=seed, run_dir=f"{out}.run"), fresh, out)
    return out


async def main(cfg: Config) -> None:
    model = cfg.model or mw.cached_folder(f"models/fresh-{cfg.seed}", lambda folder: mw.new_qwen3(folder, seed=cfg.seed))
    print("model in", await train(cfg, model, cfg.out))


if __name__ == "__main__":
    mw.main(main, Config)
