"""Groups of trajectories and a function for their advantages, packed into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from milkweed.data.packing import pack
from milkweed.errors import DataError
from milkweed.types import Batch, Group, Trajectory

if TYPE_CHECKING:
    import torch


def batch(
    groups: Sequence[Group],
    advantages: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    row_len: int = 0,
    normalise: str | tuple[str, float] = "token",
) -> Batch:
    """The scored trajectories of `groups`, each with its advantage, in rows of `row_len` tokens (0: chosen to fit).

    `advantages(rewards [n], groups [n]) -> [n]` gets the raw rewards in fp32 and the number of each trajectory's
    group. `normalise` is what the loss is divided by: trained tokens ("token"), tokens of each sequence and then
    sequences ("sequence"), or a constant (("constant", n)). Raises DataError where the behaviour log-probs were taken
    over a smaller support than the trainer's.
    """
    import torch

    scored = [(number, t) for number, g in enumerate(groups) for t in g.scored]
    for _, t in scored:
        if not t.sampling.full_support:
            raise DataError(
                f"trajectory {t.id} was sampled with temperature {t.sampling.temperature:g}, top_p {t.sampling.top_p:g}, top_k {t.sampling.top_k}: "
                "its log-probs are over another support than the trainer's and cannot stand in a ratio; train with top_p 1, top_k 0, temperature above 0"
            )
    temperatures = {t.sampling.temperature for _, t in scored}
    if len(temperatures) > 1:
        raise DataError(f"one batch mixes sampling temperatures {sorted(temperatures)}; sample a batch at one temperature")
    rewards = torch.tensor([t.reward for _, t in scored], dtype=torch.float32)
    numbers = torch.tensor([number for number, _ in scored], dtype=torch.int64)
    values = advantages(rewards, numbers)
    if values.shape != rewards.shape or not bool(torch.isfinite(values).all()):
        raise DataError(f"advantages must be finite and of shape {tuple(rewards.shape)}; got {tuple(values.shape)}: {values.tolist()[:8]}")
    earned = [row for _, t in scored for row in turn_rewards(t)] if any(_has_turn_rewards(t) for _, t in scored) else None
    return pack(
        [s if s is t else msgspec.structs.replace(s, reward=t.reward, dropped=None) for _, t in scored for s in t.sequences],
        [value for (_, t), value in zip(scored, values.tolist()) for _ in t.sequences],
        row_len=row_len,
        normalise=normalise,
        sequences=[which for which, (_, t) in enumerate(scored) for _ in t.sequences],
        groups=[number for number, t in scored for _ in t.sequences],
        extra={"rewards": earned} if earned is not None else None,
    )


def turn_rewards(trajectory: Trajectory) -> list[list[float]]:
    """The reward of each token of each of `trajectory.sequences`: what a turn earned stands at its last token, and what
    is left of the trajectory's reward at the last sampled token of all."""
    rewards, last, told = [], None, 0.0
    for s in trajectory.sequences:
        row = [0.0] * len(s.token_ids)
        for turn in s.turns:
            if turn.reward is not None and turn.end > turn.start:
                row[turn.end - 1] += turn.reward
                told += turn.reward
        if True in s.loss_mask:
            last = (row, len(row) - 1 - s.loss_mask[::-1].index(True))
        rewards.append(row)
    if last is not None:
        last[0][last[1]] += (trajectory.reward or 0.0) - told
    return rewards


def _has_turn_rewards(trajectory: Trajectory) -> bool:
    return any(turn.reward is not None for s in trajectory.sequences for turn in s.turns)


__all__ = ["batch", "turn_rewards"]
