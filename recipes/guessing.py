"""Many turns: a small Qwen3 learns to find a number by asking higher or lower. Run: ./tools/run recipes/guessing.py"""

import random

import calculator

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on a guessing game of up to five turns, after demonstrations by somebody who guesses wildly."""

    model: str = ""
    """Model folder; empty starts from a small fresh Qwen3."""
    steps: int = 90
    shown: int = 50
    """Steps that imitate wild guesses, the first ones."""
    prompts: int = 16
    """Secrets a step."""
    samples: int = 8
    """Games for each secret."""
    eval_every: int = 10
    sampling: mw.Sampling = mw.Sampling(max_tokens=4)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


class Game:
    """A secret from 10 to 41. An answer is told to be too low (+) or too high (-); the sooner it is found, the better."""

    limits = mw.Limits(turns=5)

    def reset(self, task: mw.Prompt) -> str:
        self.secret, self.turn = task.answer, 0
        return "?"

    def step(self, action: str):
        self.turn += 1
        if action == str(self.secret):
            return None, 1.2 - 0.2 * self.turn, True  # 1.0 at the first guess, 0.2 at the fifth
        if not action.isdecimal():
            return "no", 0.0, True
        return ("+" if int(action) < self.secret else "-"), 0.0, False


def wild(dice: random.Random):
    """Any number in the range, whatever was said."""
    return lambda text: str(dice.randint(10, 41))


async def main(cfg: Config) -> None:
    secrets = [mw.Prompt(id=str(n), messages=[], answer=n) for n in range(10, 42)]
    async with mw.start(cfg, model=cfg.model or calculator.fresh_model(cfg.seed)) as run:
        dice = random.Random(cfg.seed)
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, Game, dice.choices(secrets, k=64), wild(dice))
            else:
                groups = await run.sample(Game, dice.sample(secrets, cfg.prompts), n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(Game, secrets)


if __name__ == "__main__":
    mw.main(main, Config)
