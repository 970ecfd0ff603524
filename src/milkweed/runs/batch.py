"""Groups of trajectories and a function for their advantages, packed into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from milkweed.data.packing import pack
from milkweed.errors import DataError
from milkweed.types import Batch, Group

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
    return pack([t for _, t in scored], values.tolist(), row_len=row_len, normalise=normalise)


__all__ = ["batch"]
