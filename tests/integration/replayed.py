"""Runs a recipe as it is, and notes of every batch of groups it samples how far the trainer's log-probs lie from the
engines'. usage: replayed.py NOTES recipe.py [argument ...]"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import milkweed as mw
from milkweed.runs.run import Run


async def differences(run: Run, groups: list[mw.Group]) -> dict[str, float]:
    """The largest over all sampled tokens of all sequences (not of those that were dropped), and how many there were."""
    sequences = [s for g in groups for t in g.trajectories if t.dropped is None for s in t.sequences]
    batch = mw.pack(sequences)
    mine = await run.mesh.trainer.logprobs(batch)
    sampled = sum(sum(s.loss_mask[1:]) for s in sequences)
    assert batch.mask.sum() == sampled > 0
    worst = (mine - batch.logprobs)[batch.mask].abs().max().item()
    return {"step": run.step, "worst": worst, "tokens": sampled, "turns": max(sum(map(is_sampled, s.turns)) for s in sequences)}


def is_sampled(turn: mw.Turn) -> bool:
    return turn.role == "assistant"


def main() -> None:
    notes, recipe, *arguments = sys.argv[1:]
    sample, evaluated = Run.sample, Run._sample_list

    async def noted(run: Run, groups: list[mw.Group]) -> list[mw.Group]:
        with Path(notes).open("a") as file:
            file.write(json.dumps(await differences(run, groups)) + "\n")
        return groups

    async def sampled(self, *args, **options):
        return await noted(self, await sample(self, *args, **options))

    async def listed(self, env, prompts, n, sampling, key):
        groups = await evaluated(self, env, prompts, n, sampling, key)
        return await noted(self, groups) if key.startswith("eval-") else groups

    Run.sample, Run._sample_list = sampled, listed
    sys.path.insert(0, str(Path(recipe).parent))
    sys.argv = [recipe, *arguments]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
