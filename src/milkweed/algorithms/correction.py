"""Importance weights between the engine that sampled and the trainer's copy of the same version.

Both hold the same weights, yet their kernels differ, so the tokens come from a policy slightly off the one the trainer
differentiates. Each token's loss is multiplied by a detached weight made from `trainer / engine`, limited so that few
tokens cannot dominate. All in log space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, segment_mean, segment_spread, segment_sum
from milkweed.algorithms.policy_loss import LOG_RATIO_LIMIT, log_ratio
from milkweed.types import Sampling

Level = Literal["token", "sequence_mean", "sequence_sum"]
Mode = Literal["truncate", "mask"]


class Corrected(NamedTuple):
    """`weights` `[rows, seq]` to multiply the loss by, 0 outside the mask; `gate` = weights / ratio, in [0, 1];
    `metrics` `[rows, seq]`, of the ratio before anything was cut. All detached."""

    weights: Tensor
    gate: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    segments: Tensor | None = None,
    level: Level = "token",
    mode: Mode = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
) -> Corrected:
    """Truncated or masked importance weights (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"; masked: Ling Team 2025, arXiv 2510.18855).

    `old_logprobs`: the trainer's, at the version that sampled (not the policy as it is now, which the loss's own ratio
    covers); `behaviour_logprobs`: the engine's; `mask`, `segments` as everywhere, all `[rows, seq]`.

    `level`: the ratio w of a "token"; of its sequence, `exp(mean of the tokens' log-ratios)` ("sequence_mean", which
    does not grow with length but is biased); or `exp(sum)` ("sequence_sum", the unbiased one, whose variance grows).
    `mode`: "truncate" gives `min(w, upper)`; "mask" gives w where `lower <= w <= upper`, else 0. A weight is never
    raised: under "truncate" a ratio below `lower` is kept and only counted. `lower` 0 means no lower bound.

    Metrics, before anything is cut: `mismatch_ratio` (limited to e^20), `mismatch_kl` (`w - 1 - log w` by token),
    `mismatch_abs` (|log-ratio| by token), `mismatch_high` and `mismatch_low` (1 beyond a bound).
    Raises ValueError for unknown names, bounds that are not `0 <= lower <= upper` and `upper > 0`, or wrong shapes.
    """
    if not (0 <= lower <= upper and upper > 0):
        raise ValueError(f"correction needs 0 <= lower <= upper and upper > 0, not {lower} and {upper}")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"correction mode must be 'truncate' or 'mask', not {mode!r}")
    token = log_ratio(old_logprobs, behaviour_logprobs, mask).detach()
    if level == "token":
        log = token
    elif level == "sequence_mean":
        log = segment_spread(segment_mean(token, mask, segments), mask, segments)
    elif level == "sequence_sum":
        log = segment_spread(segment_sum(token, mask, segments), mask, segments)
    else:
        raise ValueError(f"correction level must be 'token', 'sequence_mean' or 'sequence_sum', not {level!r}")
    log_upper = math.log(upper)
    log_lower = math.log(lower) if lower > 0 else -math.inf
    high, low = log > log_upper, log < log_lower
    if mode == "truncate":
        log_gate = (log_upper - log).clamp(max=0.0)
    else:
        log_gate = torch.where(high | low, -torch.inf, torch.where(log.isnan(), log, 0.0))
    # exp(log + log_gate) would be inf - inf for an infinite ratio, so truncation takes the smaller logarithm itself
    weights = log.clamp(max=log_upper).exp() if mode == "truncate" else torch.where(high | low, 0.0, log.exp())
    bounded = token.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {
        "mismatch_ratio": keep(log.clamp(max=LOG_RATIO_LIMIT).exp(), mask),
        "mismatch_kl": keep(bounded.expm1() - bounded, mask),
        "mismatch_abs": keep(token.abs(), mask),
        "mismatch_high": keep(high, mask),
        "mismatch_low": keep(low, mask),
    }
    return Corrected(keep(weights, mask), keep(log_gate.exp(), mask), metrics)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The choices of `importance_weights`, for a loss that applies them. Raises ValueError as it does, on use."""

    level: Level = "token"
    mode: Mode = "truncate"
    upper: float = 2.0
    lower: float = 0.0

    def __call__(
        self, old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, segments: Tensor | None = None
    ) -> Corrected:
        return importance_weights(
            old_logprobs,
            behaviour_logprobs,
            mask,
            segments=segments,
            level=self.level,
            mode=self.mode,
            upper=self.upper,
            lower=self.lower,
        )


def require_full_support(samplings: Iterable[Sampling]) -> None:
    """Raise ValueError where tokens were drawn from less than the full vocabulary (top_p, top_k, greedy): the engine's
    log-probs are then not of the distribution the trainer computes, and a ratio of the two is biased by the kept
    mass."""
    for i, sampling in enumerate(samplings):
        if not sampling.full_support:
            raise ValueError(
                f"sample {i} was drawn with temperature {sampling.temperature}, top_p {sampling.top_p}, top_k "
                f"{sampling.top_k}: its log-probs cannot be used in a ratio. Sample with temperature above 0, top_p=1 "
                "and top_k=0, or train against the trainer's own old_logprobs without correction"
            )
