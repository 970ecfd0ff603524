"""Losses over preferences: Bradley-Terry reward models, DPO, cDPO, IPO, KTO, ORPO, SimPO, as functions of pairs.

Inputs are one number a pair, `[pairs]`: log-probs of whole completions (`sequence_logprobs`; the sum, or the mean
where a loss says "per token"), or scores. Outputs are losses `[pairs]`, not averaged. `reference_*` are detached. All
raise ValueError where shapes differ. The losses that a trainer takes are in `preference_losses`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from milkweed.algorithms.distill import log1mexp
from milkweed.algorithms.masked import as_float, same_shape, segment_mean, segment_sum


class PairLoss(NamedTuple):
    """`loss`, and the implicit rewards of the two completions (detached), all `[pairs]`."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def sequence_logprobs(
    logprobs: Tensor, mask: Tensor, segments: Tensor | None = None, *, per_token: bool = False, count: int | None = None
) -> Tensor:
    """Log-prob of each completion: the sum over its trained tokens, or their mean if `per_token`; `[rows, seq]` to
    `[n]` by segment id. Raises ValueError where shapes differ."""
    return (segment_mean if per_token else segment_sum)(logprobs, mask, segments, count)


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, centre: float = 0.0) -> PairLoss:
    """Reward model (Bradley and Terry 1952): `-log sigmoid(s_chosen - s_rejected - margin)` of the scores.

    `margin` `[pairs]`, larger for clearer preferences (Touvron et al. 2023, arXiv 2307.09288). `centre` adds `centre *
    (s_chosen + s_rejected)^2`, which holds the scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    same_shape(chosen=chosen, rejected=rejected, margin=margin)
    chosen, rejected = as_float(chosen), as_float(rejected)
    gap = chosen - rejected if margin is None else chosen - rejected - margin.detach()
    loss = -F.logsigmoid(gap)
    if centre:
        loss = loss + centre * (chosen + rejected).square()
    return PairLoss(loss, chosen.detach(), rejected.detach())


def _gaps(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    same_shape(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    return as_float(chosen) - reference_chosen.detach(), as_float(rejected) - reference_rejected.detach()


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290): `-log sigmoid(h)`, `h = beta (log pi/ref (chosen) - log pi/ref
    (rejected))`, log-probs summed over the completion.

    `label_smoothing` e in [0, 0.5) is cDPO (Mitchell 2023): `-(1 - e) log sigmoid(h) - e log sigmoid(-h)`, for labels
    that are wrong with probability e. Rewards are `beta log pi/ref`. Raises ValueError for e outside that range.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), not {label_smoothing}")
    a, b = _gaps(chosen, rejected, reference_chosen, reference_rejected)
    h = beta * (a - b)
    loss = -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)
    return PairLoss(loss, beta * a.detach(), beta * b.detach())


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float = 0.1
) -> PairLoss:
    """IPO (Azar et al. 2023, arXiv 2310.12036): `(log pi/ref (chosen) - log pi/ref (rejected) - 1 / (2 beta))^2`.

    The target gap is a fixed number, so long completions overshoot it with summed log-probs: give means per token, as
    the ready loss does. Raises ValueError unless beta is above 0.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, not {beta}")
    a, b = _gaps(chosen, rejected, reference_chosen, reference_rejected)
    return PairLoss((a - b - 1 / (2 * beta)).square(), beta * a.detach(), beta * b.detach())


def kto(
    logprobs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    beta: float = 0.1,
    reference_point: Tensor | float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306), for completions judged one by one; losses `[n]`.

    With `r = log pi/ref` (summed): `w_d (1 - sigmoid(beta (r - z)))` where `desirable` (bool `[n]`), else
    `w_u (1 - sigmoid(beta (z - r)))`. `z` is `reference_point`, detached and at least 0: an estimate of KL(pi, ref)
    over the whole batch (`kto_reference_point`).
    """
    same_shape(logprobs=logprobs, reference=reference, desirable=desirable)
    r = as_float(logprobs) - reference.detach()
    z = torch.as_tensor(reference_point, dtype=r.dtype, device=r.device).detach().clamp(min=0)
    good = desirable_weight * torch.sigmoid(beta * (z - r))
    bad = undesirable_weight * torch.sigmoid(beta * (r - z))
    return torch.where(desirable, good, bad)


def kto_reference_point(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KTO's z: `max(0, mean(log pi/ref))` over completions paired with prompts that are not theirs; `[n]` to a scalar,
    detached. Take it over the whole batch, not over a micro-batch."""
    same_shape(logprobs=logprobs, reference=reference)
    return (
        (as_float(logprobs) - reference).detach().mean().clamp(min=0)
        if logprobs.numel()
        else as_float(logprobs).new_zeros(())
    )


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> PairLoss:
    """ORPO (Hong et al. 2024, arXiv 2403.07691), no reference: `-l_c - beta log sigmoid(log odds_c - log odds_r)` with
    l the mean log-prob per token and `odds = e^l / (1 - e^l)`.

    Inputs are means per token, at most 0. Rewards are `beta l`.
    """
    same_shape(chosen=chosen, rejected=rejected)
    c, r = as_float(chosen), as_float(rejected)
    log_odds = (c - r) - (log1mexp(c) - log1mexp(r))
    return PairLoss(-c - beta * F.logsigmoid(log_odds), beta * c.detach(), beta * r.detach())


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 1.0) -> PairLoss:
    """SimPO (Meng et al. 2024, arXiv 2405.14734), no reference: `-log sigmoid(beta (l_c - l_r) - margin)` with l the
    mean log-prob per token. `margin` is the paper's gamma, not divided by beta. Rewards are `beta l`."""
    same_shape(chosen=chosen, rejected=rejected)
    c, r = as_float(chosen), as_float(rejected)
    return PairLoss(-F.logsigmoid(beta * (c - r) - margin), beta * c.detach(), beta * r.detach())
