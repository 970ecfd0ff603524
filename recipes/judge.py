"""A judge's reward: another model scores the answers. Run: ./tools/run recipes/judge.py [--judge URL --judge-model
NAME]"""

import os
import random

import calculator

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """GRPO on greetings, scored by a model behind an OpenAI-compatible API."""

    model: str = ""
    """Model folder; empty starts from a small fresh Qwen3."""
    judge: str = ""
    """Base URL of the judge; its key is read from JUDGE_API_KEY. Empty: a rule that stands in for one, served
    likewise."""
    judge_model: str = "judge"
    """The judge's model name."""
    steps: int = 50
    shown: int = 30
    """Steps that imitate a teacher of mixed manners, the first ones."""
    prompts: int = 8
    """Greetings a step."""
    samples: int = 8
    """Answers to each."""
    eval_every: int = 10
    sampling: mw.Sampling = mw.Sampling(max_tokens=24)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=1e-3, warmup_steps=10, decay="linear", seq_len=256, micro_rows=64)


RUBRIC = "How friendly is the answer? 10: it thanks, and wishes well. 0: it does neither."
SAID = ["hi", "thanks, hi", "hi, be well", "thanks, be well"]


def stand_in(text: str) -> str:
    """A judge in one line: points for thanks and for good wishes in the answer."""
    answer = text.rpartition("Answer:")[2].partition("End with")[0]
    return f"Score: {5 * ('thanks' in answer) + 5 * ('be well' in answer)}"


async def main(cfg: Config) -> None:
    tasks = [mw.Prompt(id=name, messages=[{"role": "user", "content": f"hello from {name}"}]) for name in "abcdefghijkl"]
    async with (
        mw.start(cfg, model=cfg.model or calculator.fresh_model(cfg.seed)) as run,
        mw.Gateway(mw.Expert(run.mesh.chat, stand_in), run.mesh.chat, sampling=mw.Sampling(max_tokens=200)) as local,
    ):
        url, key = (cfg.judge, os.environ.get("JUDGE_API_KEY", "")) if cfg.judge else (local.base_url, local.token)
        judge = mw.Judge(mw.Endpoint(url, cfg.judge_model, key), RUBRIC)

        async def greet(task: mw.Prompt, policy) -> mw.Trajectory:
            """One answer, scored by the judge; without a score it is dropped."""
            completion = await policy.sample(task.token_ids)
            return completion.trajectory(await judge(task, completion.text))

        prompts, dice = run.stream(tasks), random.Random(cfg.seed)
        async for step in run.steps():
            if step <= cfg.shown:
                await mw.imitate(run, greet, prompts.take(32), lambda text: dice.choice(SAID))
            else:
                groups = await run.sample(greet, prompts.take(cfg.prompts), n=cfg.samples)
                await run.train(mw.batch(groups, mw.algorithms.grpo), mw.algorithms.grpo_loss(clip=0.2))
                await run.publish()
            if step >= cfg.shown and step % cfg.eval_every == 0:
                await run.evaluate(greet, run.render(tasks))


if __name__ == "__main__":
    mw.main(main, Config)
