"""Prompts in, groups of scored trajectories out: runs an environment many times beside each other."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections.abc import Sequence
from typing import Any

from milkweed.errors import DataError, FleetError, MilkweedError
from milkweed.types import Completion, Environment, Group, Prompt, Sampling, Trajectory


class Handle:
    """The policy as an environment sees it. `session` keeps a trajectory's turns (and a group's samples) on one
    engine, where their prefix is cached; `scorer` is what rewards are run on."""

    def __init__(self, router: Any, sampling: Sampling, session: str, scorer: Any = None):
        self._router, self._sampling, self._session, self.scorer = router, sampling, session, scorer

    async def sample(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One completion of `token_ids`. Raises DataError for a prompt that does not fit the context, FleetError
        when no engine is left, DeadlineExceeded when none answered in time."""
        return await self._router.sample(token_ids, sampling or self._sampling, session=self._session)


def failed(reason: str, prompt: Prompt, sampling: Sampling) -> Trajectory:
    """A trajectory that never came to be: nothing to train, and a reason that is counted."""
    return Trajectory(
        token_ids=list(prompt.token_ids),
        loss_mask=[False] * len(prompt.token_ids),
        logprobs=[0.0] * len(prompt.token_ids),
        versions=[],
        turns=[],
        finish_reason="error",
        sampling=sampling,
        error=reason,
        dropped=reason,
    )


async def sample_groups(
    env: Environment,
    prompts: Sequence[Prompt],
    router: Any,
    *,
    scorer: Any = None,
    samples: int,
    sampling: Sampling,
    key: str,
    seed: int = 0,
    deadline_s: float = 600.0,
    sticky: bool = True,
) -> list[Group]:
    """`samples` trajectories of every prompt, as groups in the order of `prompts`.

    `key` (a run's step, say) makes group ids unique: `key/prompt id`. A trajectory whose environment raises, or passes
    `deadline_s`, comes back dropped with its reason; the others are not touched. A lost fleet is raised: with no
    engine left there is nothing to go on with.
    """

    async def one(prompt: Prompt, group: str, index: int) -> Trajectory:
        handle = Handle(router, sampling, group if sticky else f"{group}/{index}", scorer)
        try:
            async with asyncio.timeout(deadline_s):
                trajectory = await env(prompt, handle)
        except DataError as error:
            trajectory = failed(f"data: {error}", prompt, sampling)
        except (FleetError, asyncio.CancelledError):
            raise
        except TimeoutError:
            trajectory = failed(f"environment passed its deadline of {deadline_s:g} s ({prompt.id})", prompt, sampling)
        except MilkweedError as error:
            trajectory = failed(f"{type(error).__name__}: {error}", prompt, sampling)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"environment raised {type(error).__name__}: {error} ({where.name}, line {where.lineno}; prompt {prompt.id})"
            trajectory = failed(reason, prompt, sampling)
        trajectory.id, trajectory.index = f"{group}/{index}", index
        trajectory.prompt_id, trajectory.group_id = prompt.id, group
        trajectory.seed = int.from_bytes(hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=6).digest())
        if trajectory.reward is None and trajectory.dropped is None:
            trajectory.dropped = "the environment gave no reward"
        return trajectory

    named = [(prompt, f"{key}/{prompt.id}") for prompt in prompts]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [[tasks.create_task(one(p, g, i)) for i in range(samples)] for p, g in named]
    except* FleetError as lost:
        raise first_leaf(lost) from None  # every waiter was told the same: one error says it
    return [Group(id=g, prompt=p, trajectories=[t.result() for t in row]) for (p, g), row in zip(named, running)]


def first_leaf(group: BaseExceptionGroup) -> BaseException:
    """The first error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def drops(groups: Sequence[Group]) -> dict[str, int]:
    """How many trajectories were dropped for which reason (what stands before the first colon or bracket)."""
    counts: dict[str, int] = {}
    for group in groups:
        for t in group.trajectories:
            if t.dropped is not None:
                reason = t.dropped.split(":")[0].split("(")[0].strip()
                counts[reason] = counts.get(reason, 0) + 1
    return counts
