"""Demonstrations of an environment, played by a function and imitated: how a model learns what the moves look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from milkweed.data.packing import pack
from milkweed.environments.expert import Expert
from milkweed.errors import DataError
from milkweed.runs.sampling import sample_groups
from milkweed.types import Environment, Prompt

if TYPE_CHECKING:
    from milkweed.runs.run import Run


async def imitate(
    run: Run, env: Environment | type, prompts: Sequence[Prompt], say: Callable[[str], str]
) -> dict[str, float]:
    """One optimiser step of supervised learning on `env` as `say` plays it: `say(text)` gets all that was said so far,
    special tokens written out, and returns the next message. Trains on what it said, whatever reward that got; ends the
    step. Returns the trainer's metrics. Raises DataError where the environment failed under every prompt."""
    from milkweed.algorithms import sft_loss

    chat, c = run.mesh.chat, run.config
    groups = await sample_groups(
        env,
        prompts,
        Expert(chat, say),
        scorer=run.mesh.reward,
        chat=chat,
        workers=run.mesh.environment,
        samples=1,
        sampling=c.sampling,
        key=f"shown-{run.step + 1}",
        deadline_s=c.trajectory_deadline_s,
    )
    shown = [s for g in groups for t in g.trajectories if t.dropped is None for s in t.sequences]
    if not shown:
        reasons = sorted({t.dropped or "?" for g in groups for t in g.trajectories})
        raise DataError(f"step {run.step + 1}: nothing was shown: {'; '.join(reasons[:3])}")
    metrics = await run.train(pack(shown), sft_loss())
    run.log()
    return metrics
