"""On-policy distillation: a student's samples, a teacher's log-probs. Run: ./tools/run recipes/distill.py [--top-k 16]"""

from dataclasses import replace

import grpo
import sft

import milkweed as mw


class Config(mw.RunConfig, kw_only=True):
    """Reverse KL to a teacher on two-digit sums: sample, ask the teacher, train, publish."""

    model: str = ""
    """The student's folder; empty starts from the small Qwen3 that recipes/sft.py warms up."""
    teacher: str = ""
    """The teacher's folder, of the same tokenizer; empty: the model itself as it was, only surer of what it says."""
    teacher_temperature: float = 0.5
    """The teacher's logits are divided by it; engines know 1 only."""
    engine: bool = False
    """Serve the teacher's folder with engines of its own instead of a trainer's ranks."""
    top_k: int = 0
    """Compare the teacher's so many likeliest words at each token; 0: only the word that was sampled."""
    steps: int = 60
    prompts: int = 64
    """Prompts a step."""
    samples: int = 2
    """Completions of each prompt."""
    eval_prompts: int = 256
    """Held-out prompts an evaluation."""
    sampling: mw.Sampling = mw.Sampling(max_tokens=4)
    trainer: mw.TrainerConfig = mw.TrainerConfig(lr=4e-4, warmup_steps=4, decay="linear", seq_len=256, micro_rows=64)


async def taught(cfg: Config, run: mw.Run, batch: mw.Batch) -> mw.Batch:
    """`batch` with what the teacher says of each token."""
    teacher = run.mesh.teacher if cfg.engine else run.mesh.reference
    asked = replace(batch, temperature=cfg.teacher_temperature)
    batch.extra["teacher_logprobs"] = await teacher.logprobs(asked)
    if cfg.top_k:
        ids, logprobs = await teacher.top_logprobs(asked, cfg.top_k)
        batch.extra |= {"teacher_top_ids": ids, "teacher_top_logprobs": logprobs}
    return batch


async def reverse_kl(cfg: Config, run: mw.Run, solve: mw.Environment, exam: list[mw.Prompt]) -> float:
    """KL from student to teacher a token, on samples of held-out prompts; k3, which varies least."""
    groups = await run.sample(solve, exam, n=4)
    batch = await taught(cfg, run, mw.batch(groups, mw.algorithms.reinforce))
    kl = mw.algorithms.kl_estimate(batch.logprobs, batch.extra["teacher_logprobs"], batch.mask, "k3")
    return (kl * batch.weights).sum().item()


async def main(cfg: Config) -> None:
    if cfg.engine and not (cfg.teacher and cfg.teacher_temperature == 1):
        raise mw.ConfigError("engine: name a teacher and set teacher_temperature to 1, which is what engines score at")
    train_set, held_out = sft.sums()
    model = cfg.model or await sft.warm_model(cfg.seed)
    teacher = {"teacher": cfg.teacher} if cfg.engine else {"reference": cfg.teacher or True}
    async with mw.start(cfg, model=model, **teacher) as run:
        solve = mw.single_turn(grpo.reward)
        loss = mw.algorithms.distill_top_k_loss() if cfg.top_k else mw.algorithms.distill_loss()
        prompts, exam = run.stream(train_set), run.render(held_out[: cfg.eval_prompts])
        run.note(held_out_reverse_kl=await reverse_kl(cfg, run, solve, exam))
        async for step in run.steps():
            groups = await run.sample(solve, prompts.take(cfg.prompts), n=cfg.samples)
            batch = mw.batch(groups, mw.algorithms.reinforce)
            await run.train(await taught(cfg, run, batch), loss)
            await run.publish()
            if step % cfg.eval_every == 0:
                run.note(held_out_reverse_kl=await reverse_kl(cfg, run, solve, exam))


if __name__ == "__main__":
    mw.main(main, Config)
