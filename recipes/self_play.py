"""Self-play: a small Qwen3 learns Nim against itself; each player has a trajectory and a reward of its own.
Run: ./tools/run recipes/self_play.py"""

import random

import calculator

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on Nim: take one to three matches in turn, who takes the last one wins."""

    model: str = ""
    """Model folder; empty starts from a small fresh Qwen3."""
    steps: int = 100
    shown: int = 40
    """Steps that imitate random moves, the first ones."""
    piles: int = 12
    """Piles a step."""
    samples: int = 8
    """Games from each pile."""
    eval_every: int = 10
    sampling: mw.Sampling = mw.Sampling(max_tokens=3)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


async def game(task: mw.Prompt, policy) -> list[mw.Trajectory]:
    """Two players, one policy. An illegal move loses."""
    left, players = task.answer, [policy.talk([], agent=name) for name in ("first", "second")]
    for turn in range(left + 1):
        mover, other = players[turn % 2], players[1 - turn % 2]
        reply = await mover.reply(str(left))
        if reply is None or reply.text not in ("1", "2", "3") or int(reply.text) > left:
            return [mover.trajectory(-1.0), other.trajectory(0.0)]  # the other has done nothing for it
        left -= int(reply.text)
        if left == 0:
            return [mover.trajectory(1.0), other.trajectory(-1.0)]
    raise AssertionError("a pile of n is gone after n turns")


async def best_replies(task: mw.Prompt, policy) -> mw.Trajectory:
    """The exam: 1 for leaving a multiple of four, which wins whatever the other does."""
    talk = policy.talk([])
    reply = await talk.reply(str(task.answer))
    return talk.trajectory(float(reply is not None and reply.text == str(task.answer % 4)))


def random_mover(dice: random.Random):
    """Any legal move."""

    def say(text: str) -> str:
        left = int(text.split("<|end|>")[-2].rpartition("|>")[2])
        return str(dice.randint(1, min(3, left)))

    return say


async def main(cfg: Config) -> None:
    piles = [mw.Prompt(id=str(n), messages=[], answer=n) for n in range(1, 13)]
    async with mw.start(cfg, model=cfg.model or calculator.fresh_model(cfg.seed)) as run:
        dice, exam = random.Random(cfg.seed), [p for p in piles if p.answer % 4]
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, game, dice.choices(piles, k=48), random_mover(dice))
            else:
                groups = await run.sample(game, piles[: cfg.piles], n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(best_replies, exam)


if __name__ == "__main__":
    mw.main(main, Config)
