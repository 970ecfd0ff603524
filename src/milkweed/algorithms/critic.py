"""The critic's loss, and what it reads from a value head."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, same_shape, segment_last, segment_sum, shift_to_tokens
from milkweed.algorithms.policy_loss import TokenLoss
from milkweed.types import Batch, Loss


class ValueOutput(Protocol):
    """What a loss sees of a model with a value head."""

    values: Tensor
    """`[rows, seq]` fp32, the head at each position, with no temperature: the value of the state *after* token t. At a
    sequence's last token it is the reward model's score, or the value to bootstrap from."""


def values_before(values: Tensor, segments: Tensor | None = None) -> Tensor:
    """The value of the state in which each token was chosen: the head's output at the token before it, 0 at the first
    of a sequence. `[rows, seq]`, aligned with tokens, as `gae` wants it. Raises ValueError where shapes differ."""
    return shift_to_tokens(values, segments)


def last_values(values: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """The head at the last trained token of each sequence: a reward model's scores, `[rows, seq]` to `[n]` by segment
    id, 0 for a sequence without trained tokens. Raises ValueError where shapes differ."""
    return segment_sum(values, segment_last(mask, segments), segments)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.2
) -> TokenLoss:
    """PPO's value loss of each token: `max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2`.

    From the reference code of Schulman et al. 2017, arXiv 1707.06347; `clip` None leaves only the first square. All
    `[rows, seq]` and aligned with tokens; 0 outside the mask; gradients flow to `values` only. Metrics: `value`,
    `value_error` (V - R), `value_clip_fraction` (the clipped square strictly the larger).
    Raises ValueError for a clip not above 0 or wrong shapes.
    """
    same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    v, old, target = keep(values, mask), keep(old_values.detach(), mask), keep(returns.detach(), mask)
    free = (v - target).square()
    loss, active = free, torch.zeros_like(mask)
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"value clip must be above 0 or None, not {clip}")
        clipped = (old + (v - old).clamp(-clip, clip) - target).square()
        loss, active = torch.maximum(free, clipped), clipped > free
    metrics = {"value": v.detach(), "value_error": (v - target).detach(), "value_clip_fraction": keep(active, mask)}
    return TokenLoss(keep(loss / 2, mask), metrics)


def _value(batch: Batch, output: ValueOutput, *, clip: float | None) -> TokenLoss:
    missing = [k for k in ("returns", "values") if k not in batch.extra and (k == "returns" or clip is not None)]
    if missing:
        raise ValueError(f"value_loss needs batch.extra[{missing[0]!r}]: the critic's {missing[0]}, [rows, seq]")
    now = values_before(output.values, batch.segments)
    return clipped_value_loss(now, batch.extra.get("values", now), batch.extra["returns"], batch.mask, clip=clip)


def value_loss(*, clip: float | None = 0.2) -> Loss:
    """`clipped_value_loss` as a `Loss` for a model whose output is a `ValueOutput`.

    `batch.extra["returns"]` are the targets and `batch.extra["values"]` the values when sampled (both aligned with
    tokens, from `gae` and `values_before`). Raises ValueError where one is missing.
    """
    return partial(_value, clip=clip)
