"""KL divergence from a reference: estimators on sampled tokens, the exact one over the vocabulary, and its use in
rewards.

Which use gives the gradient of KL(pi, ref), for tokens sampled from pi:

| kind | value: unbiased? | as a loss, on its own                  | in the reward (detached)         |
|------|------------------|----------------------------------------|----------------------------------|
| k1   | yes              | 0 in expectation: useless              | the exact gradient               |
| k2   | no, 2nd order    | the exact gradient                     | wrong                            |
| k3   | yes              | the gradient of KL(ref, pi): the wrong way round | short by that same gradient |
| k1+ k2+ k3+ | as k1 k2 k3 | the exact gradient (k2's, straight through) | as without +                 |

With `old_logprobs`, k1 and k3 are weighted by pi / pi_old with its gradient: then both give the exact gradient as a
loss, also for tokens of an older policy (DeepSeek-AI 2025, arXiv 2512.02556, for k3).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, row_segments, same_shape
from milkweed.algorithms.policy_loss import LOG_RATIO_LIMIT, bounded_exp, log_ratio
from milkweed.algorithms.returns import place_outcomes

Kind = Literal["k1", "k2", "k3", "k1+", "k2+", "k3+"]
KINDS: tuple[Kind, ...] = ("k1", "k2", "k3", "k1+", "k2+", "k3+")


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    kind: Kind = "k3+",
    *,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """KL(pi, reference) at each sampled token, `[rows, seq]`, 0 outside the mask (Schulman 2020, "Approximating KL
    divergence"; gradients: Tang and Munos 2025, arXiv 2506.09477).

    With `d = log ref - log pi`: k1 = `-d`; k2 = `d^2 / 2`; k3 = `e^d - 1 - d`. A "+" keeps the value and takes the
    gradient of k2. `old_logprobs` multiplies by `pi / pi_old` (gradient and all); not with a "+", whose gradient it
    would spoil. d is limited to +-20 inside the exponential. Gradients flow to `logprobs` only.
    Raises ValueError for an unknown kind, "+" with `old_logprobs`, or wrong shapes.
    """
    if kind not in KINDS:
        raise ValueError(f"kl kind must be one of {', '.join(KINDS)}, not {kind!r}")
    d = -log_ratio(logprobs, reference_logprobs, mask)
    half_square = d.square() / 2
    if kind[1] == "1":
        value = -d
    elif kind[1] == "2":
        value = half_square
    else:
        value = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() - d
    if kind.endswith("+"):
        if old_logprobs is not None:
            raise ValueError(
                f"kl kind {kind} takes its gradient from k2 and cannot be weighted by old_logprobs: use {kind[:2]}"
            )
        value = half_square - half_square.detach() + value.detach()
    elif old_logprobs is not None:
        value = bounded_exp(log_ratio(logprobs, old_logprobs, mask)) * value
    return keep(value, mask)


def kl_in_reward(
    outcomes: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    coefficient: float,
    kind: Kind = "k1",
    segments: Tensor | None = None,
) -> Tensor:
    """Rewards on tokens: `-coefficient * KL_t` on each trained one, plus the sequence's outcome on its last; `[rows,
    seq]`, 0 outside the mask, detached.

    `outcomes` `[n]` by segment id; `logprobs` of the policy that sampled. k1 is the kind that makes a policy gradient
    on these rewards exact (see the module). Raises ValueError for an unknown kind or wrong shapes.
    """
    segments = row_segments(mask, segments)
    penalty = kl_estimate(logprobs.detach(), reference_logprobs, mask, kind)
    return place_outcomes(outcomes.detach().to(penalty.dtype), mask, segments) - coefficient * penalty


def categorical_kl(logits: Tensor, other_logits: Tensor, mask: Tensor) -> Tensor:
    """Exact `KL(p, q) = sum_v p_v (log p_v - log q_v)` over the vocabulary, at each token; `[rows, seq]`.

    `logits` of p and `other_logits` of q `[rows, seq, vocab]`, already divided by the temperature. A word that p rules
    out (-inf) adds 0. Gradients flow to both. Raises ValueError where shapes differ.
    """
    same_shape(logits=logits, other_logits=other_logits)
    rule = mask.unsqueeze(-1).expand(logits.shape)
    p, q = keep(logits, rule).log_softmax(-1), keep(other_logits, rule).log_softmax(-1)
    ruled_out = p == -torch.inf
    gap = torch.where(ruled_out, 0.0, p) - torch.where(ruled_out, 0.0, q)
    return keep((torch.where(ruled_out, 0.0, p.exp()) * gap).sum(-1), mask)
