"""A small run for test_async_run.py, started as a recipe: GRPO on sums, with a reward that differs between samples."""

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    model: str = ""
    steps: int = 9
    eval_every: int = 4
    checkpoint_every: int = 3
    sampling: mw.Sampling = mw.Sampling(max_tokens=16, ignore_eos=True)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-4, seq_len=256, micro_rows=16)


def reward(prompt: mw.Prompt, completion: str) -> float:
    return float(sum(map(ord, completion)) % 2)


async def main(cfg: Config) -> None:
    data = mw.split(mw.arithmetic(digits=2, low=10, question="{a}+{b}="), held_out=0.2)
    async with mw.start(cfg, model=cfg.model) as run:
        solve, loss = mw.single_turn(reward), mw.algorithms.grpo_loss()
        prompts, exam = run.stream(data.train), run.render(data.held_out[:16])
        await run.evaluate(solve, exam)
        async for step in run.steps():
            groups = await run.sample(solve, prompts, 8, n=4)
            await run.train(mw.batch(groups, mw.algorithms.grpo), loss)
            await run.publish()
            if step % cfg.eval_every == 0:
                await run.evaluate(solve, exam)


if __name__ == "__main__":
    mw.main(main, Config)
