"""Policy-gradient losses of single tokens: PPO's clip and its variants, GSPO, CISPO, REINFORCE.

Shared meaning of the arguments, all `[rows, seq]` and aligned with the tokens: `logprobs` of the policy being trained
(gradients flow here only), `old_logprobs` that the ratio is taken against, `advantages`, and the bool `mask` of trained
tokens. The result is a `TokenLoss`: the loss of each token (0 outside the mask), not yet divided by anything:
multiply by weights (`loss_weights`) and sum. Metrics are detached and `[rows, seq]`.

Log-ratios are limited to +-20 before the exponential, so that no sign of advantage makes infinity or NaN of a finite
input; beyond it the gradient is 0. At equal log-probs the ratio is exactly 1. All raise ValueError where shapes differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, same_shape, segment_mean, segment_spread

LOG_RATIO_LIMIT = 20.0


class TokenLoss(NamedTuple):
    """`loss` `[rows, seq]` and detached metrics `[rows, seq]` by name; the pair that a `types.Loss` returns."""

    loss: Tensor
    metrics: dict[str, Tensor]


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`log pi - log pi_old` where `mask`, 0 elsewhere, before any limit; the old side is detached."""
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    return keep(logprobs, mask) - keep(old_logprobs.detach(), mask)


def bounded_exp(log: Tensor) -> Tensor:
    """`exp(log)` with `log` limited to +-20."""
    return log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    high = clip if clip_high is None else clip_high
    if not (0 <= clip <= 1 and high >= 0):
        raise ValueError(f"clip must lie in [0, 1] and clip_high be 0 or above, not {clip} and {clip_high}")
    return 1.0 - clip, 1.0 + high


def _metrics(log: Tensor, ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Tensor]:
    log, ratio = log.detach(), ratio.detach()
    moved = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "ratio": keep(ratio, mask),
        "clip_fraction": keep(clipped, mask),
        "approx_kl": keep(moved.expm1() - moved, mask),
    }


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Loss and, as bool, where the clipped branch is strictly the larger one."""
    free, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss = torch.maximum(free, clipped)
    active = clipped > free
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, active = torch.where(over, ceiling, loss), active | over
    return loss, active


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347): `-min(r A, clip(r, 1 - clip, 1 + clip_high) A)`
    with `r = pi / pi_old` of the token.

    `clip_high` (None: as `clip`) sets the upper bound apart, DAPO's "clip higher" (Yu et al. 2025, arXiv 2503.14476).
    `dual_clip` c > 1 bounds the loss by `-c A` where A < 0 only (Ye et al. 2020, arXiv 1912.09729). Metrics: `ratio`,
    `clip_fraction` (1 where a clipped branch is strictly the larger), `approx_kl` (`r - 1 - log r`, of old from new).
    """
    log = log_ratio(logprobs, old_logprobs, mask)
    ratio, a = bounded_exp(log), keep(advantages.detach(), mask)
    loss, active = _clipped_surrogate(ratio, a, *_bounds(clip, clip_high), dual_clip)
    return TokenLoss(keep(loss, mask), _metrics(log, ratio, active, mask))


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    segments: Tensor | None = None,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    per_token: bool = False,
) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): PPO's clip on `s = exp(mean over the sequence's trained tokens of
    log pi - log pi_old)`, the same for each of its tokens.

    Use "sequence" normalisation for the paper's objective. `segments` `[rows, seq]` (None: one sequence a row). Only
    the mean is limited to +-20, never a token. `per_token`: the paper's GSPO-token, the same value, but the gradient
    of each token through its own log-prob only, for advantages that differ within a sequence. Metrics as in
    `ppo_clip`, of s.
    """
    log = log_ratio(logprobs, old_logprobs, mask)
    sequence = segment_spread(segment_mean(log, mask, segments), mask, segments)
    if per_token:
        own = keep(logprobs, mask)
        sequence = sequence.detach() + (own - own.detach())
    ratio, a = bounded_exp(sequence), keep(advantages.detach(), mask)
    loss, active = _clipped_surrogate(ratio, a, *_bounds(clip, clip_high), None)
    return TokenLoss(keep(loss, mask), _metrics(sequence, ratio, active, mask))


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    max_ratio: float = 5.0,
    min_ratio: float = 0.0,
) -> TokenLoss:
    """CISPO (MiniMax 2025, arXiv 2506.13585): `-sg(clip(r, min_ratio, max_ratio)) A log pi`; the weight is clipped, the
    gradient of no token is dropped.

    The bounds are of the ratio itself (the paper's 1 - eps_low and 1 + eps_high). Metrics as in `ppo_clip`;
    `clip_fraction` is 1 where the ratio lay outside the bounds. Raises ValueError unless `0 <= min_ratio < max_ratio`.
    """
    if not 0 <= min_ratio < max_ratio:
        raise ValueError(f"cispo needs 0 <= min_ratio < max_ratio, not {min_ratio} and {max_ratio}")
    log = log_ratio(logprobs, old_logprobs, mask)
    ratio = bounded_exp(log).detach()
    loss = -ratio.clamp(min_ratio, max_ratio) * keep(advantages.detach(), mask) * keep(logprobs, mask)
    return TokenLoss(keep(loss, mask), _metrics(log, ratio, (ratio > max_ratio) | (ratio < min_ratio), mask))


def reinforce_term(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """REINFORCE (Williams 1992): `-A log pi` of each token; no ratio, so no metrics."""
    same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    return TokenLoss(-keep(advantages.detach(), mask) * keep(logprobs, mask), {})
