"""The simplest environment: sample once, score what came."""

from __future__ import annotations

import inspect

from milkweed.environments.reward import Reward, current
from milkweed.errors import RewardError
from milkweed.types import Environment, Policy, Prompt, Sampling, Trajectory


def single_turn(reward: Reward, *, deadline_s: float | None = None, sampling: Sampling | None = None) -> Environment:
    """An environment of one turn: `reward(prompt, completion_text)` is run outside the controller, and killed after
    `deadline_s` (default: the scorer's). A reward with a parameter `trajectory` is also given the trajectory.

    Where it raises, gives no finite number, never returns or ends its process, the trajectory comes back without a
    reward and with `dropped` saying why; so does one that the engine could not finish. Raises FleetError when no
    reward worker is left.
    """
    wants = _parameters(reward)

    async def environment(prompt: Prompt, policy: Policy) -> Trajectory:
        completion = await policy.sample(prompt.token_ids, sampling)
        trajectory = completion.trajectory()
        if completion.finish_reason in ("abort", "error"):
            # cut short by us, not by the policy: its reward would be another's fault
            cause = completion.error or "no cause given"
            trajectory.dropped = f"sampling ended with {completion.finish_reason}: {cause}"
            return trajectory
        extra = {"trajectory": trajectory} if "trajectory" in wants else {}
        try:
            score = await current(policy).score(reward, prompt, completion.text, deadline_s=deadline_s, **extra)
        except RewardError as error:
            trajectory.dropped = str(error)
            return trajectory
        trajectory.reward, trajectory.reward_parts = score
        return trajectory

    environment.__name__ = environment.__qualname__ = f"single_turn({getattr(reward, '__name__', 'reward')})"
    return environment


def _parameters(fn: Reward) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some callables written in C have none
        return frozenset()
