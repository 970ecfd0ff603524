"""The run that tools/strike.py strikes: GRPO on sums with a tiny model, sampling ahead, a checkpoint every few steps.

A file `window` in the run directory names a moment at which this process is to kill itself; see `Windows`. While there is
a file `raise`, the reward raises for every third sample.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

import psutil

import milkweed as mw
from milkweed.data.ledger import Ledger
from milkweed.rollout import Router
from milkweed.runs.mesh import Mesh
from milkweed.training import Trainer


class Windows:
    """Kills this process within a call that the file names: publish, commit, ledger write or checkpoint rename."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "window"
        self.wrap(Mesh, "publish", "publish")
        self.wrap(Router, "update_weights", "commit")
        save, commit = Trainer.save, Ledger._commit

        async def saved(*args, **options):
            if self.wanted("checkpoint rename"):
                self.watch = asyncio.ensure_future(self.die_in_checkpoint())
            return await save(*args, **options)

        Trainer.save = saved  # type: ignore[method-assign]

        def struck(ledger: Ledger, rows: list) -> None:
            if rows and self.wanted("ledger write"):
                ledger._segments.write()  # its bytes are there, the rows that speak of them are not
                self.die()
            commit(ledger, rows)

        Ledger._commit = struck  # type: ignore[method-assign]

    def wanted(self, window: str) -> bool:
        return self.file.is_file() and self.file.read_text() == window

    def die(self) -> None:
        self.file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    async def die_in_checkpoint(self) -> None:
        """While one is being written and has not got its name yet; the ranks that write it die with this process."""
        while not any(not (place / ".metadata").exists() for place in (self.file.parent / "checkpoints").glob("step-*")):
            await asyncio.sleep(0.0005)
        await asyncio.sleep(random.uniform(0.0, 0.01))
        for child in psutil.Process().children(recursive=True):
            child.kill()
        self.die()

    def wrap(self, owner: type, name: str, window: str) -> None:
        inner = getattr(owner, name)

        async def struck(*args, **options):
            if self.wanted(window):
                asyncio.get_running_loop().call_later(random.uniform(0.0, 0.05), self.die)
            return await inner(*args, **options)

        setattr(owner, name, struck)


class Config(mw.RunConfig, kw_only=True):
    model: str = ""
    steps: int = 1_000_000
    eval_every: int = 1_000_000
    checkpoint_every: int = 5
    staleness: int = 1
    samples_logged: int = 1
    sampling: mw.Sampling = mw.Sampling(max_tokens=24, ignore_eos=True)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-4, seq_len=256, micro_rows=16)


def reward_of(folder: Path):
    def reward(prompt: mw.Prompt, completion: str) -> float:
        number = sum(map(ord, completion))
        if number % 3 == 0 and (folder / "raise").exists():
            raise RuntimeError("struck")
        return float(number % 2)

    return reward


async def main(cfg: Config) -> None:
    data = mw.split(mw.arithmetic(digits=2, low=10, question="{a}+{b}="), held_out=0.2)
    Windows(Path(cfg.run_dir))
    reward = reward_of(Path(cfg.run_dir).absolute())
    async with mw.start(cfg, model=cfg.model) as run:
        prompts, loss = run.stream(data.train), mw.algorithms.grpo_loss()
        async for _ in run.steps():
            groups = await run.sample(mw.single_turn(reward), prompts, 8, n=4)
            await run.train(mw.batch(groups, mw.algorithms.grpo), loss)
            await run.publish()


if __name__ == "__main__":
    mw.main(main, Config)
