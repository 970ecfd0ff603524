"""Ready policy-gradient losses: `Loss` functions over (batch, policy), each a few lines over the pure functions.

What they read of a batch: `mask`, `advantages`; the log-probs that the ratio is taken against, which are
`extra["old_logprobs"]` (the trainer's at the version that sampled) if there, else `logprobs` (the engine's); and
`extra["reference_logprobs"]` for the KL. They return losses of tokens; the trainer applies `weights`.

Shared options. `kl`: coefficient of the KL term, `kl_kind` its estimator (see `kl`). `entropy`: coefficient of the
entropy bonus. `correction`: importance weights between trainer and engine (`Correction()`), which need `old_logprobs`
or `on_policy`. `on_policy`: the ratio is taken against the policy itself, hence 1: right for one update a batch.
`measure_entropy`: entropy as a metric. Metrics are those of the parts, plus `kl`, `entropy`, `mismatch_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from milkweed.algorithms.correction import Correction
from milkweed.algorithms.entropy import entropy_bonus
from milkweed.algorithms.kl import KINDS, Kind, kl_estimate
from milkweed.algorithms.masked import keep
from milkweed.algorithms.policy_loss import TokenLoss, cispo, gspo, ppo_clip, reinforce_term
from milkweed.types import Batch, Loss, PolicyOutput


def old_logprobs(batch: Batch, policy: PolicyOutput, on_policy: bool = False) -> Tensor:
    """What the ratio is taken against, `[rows, seq]`, detached: see the module."""
    if on_policy:
        return policy.logprobs.detach()
    return batch.extra.get("old_logprobs", batch.logprobs)


def _policy_gradient(
    batch: Batch,
    policy: PolicyOutput,
    *,
    surrogate: Callable[..., TokenLoss],
    kl: float,
    kl_kind: Kind,
    entropy: float,
    correction: Correction | None,
    on_policy: bool,
    measure_entropy: bool,
) -> TokenLoss:
    mask, old = batch.mask, old_logprobs(batch, policy, on_policy)
    loss, metrics = surrogate(policy.logprobs, old, batch.advantages, mask, batch.segments)
    metrics = dict(metrics)
    if correction is not None:
        if not on_policy and "old_logprobs" not in batch.extra:
            raise ValueError(
                "correction compares the trainer's log-probs at the sampling version with the engine's: put the former "
                "in batch.extra['old_logprobs'] (trainer.logprobs), or use on_policy=True with one update a batch"
            )
        corrected = correction(old, batch.logprobs, mask, batch.segments)
        loss = keep(loss * corrected.weights, mask)
        metrics |= corrected.metrics
    if kl:
        if "reference_logprobs" not in batch.extra:
            raise ValueError(
                "kl is not 0, so batch.extra['reference_logprobs'] is needed: the reference's, [rows, seq]"
            )
        term = kl_estimate(policy.logprobs, batch.extra["reference_logprobs"], mask, kl_kind)
        loss = loss + kl * term
        metrics["kl"] = term.detach()
    if entropy:
        spread = policy.entropy()
        loss = loss + entropy_bonus(spread, mask, entropy)
        metrics["entropy"] = keep(spread.detach(), mask)
    elif measure_entropy:
        with torch.no_grad():
            metrics["entropy"] = keep(policy.entropy(), mask)
    return TokenLoss(loss, metrics)


def surrogate_loss(
    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], TokenLoss],
    *,
    kl: float = 0.0,
    kl_kind: Kind = "k3+",
    entropy: float = 0.0,
    correction: Correction | None = None,
    on_policy: bool = False,
    measure_entropy: bool = True,
) -> Loss:
    """A `Loss` from a surrogate of one's own: `surrogate(logprobs, old_logprobs, advantages, mask, segments)`, all
    `[rows, seq]`, returns `TokenLoss(loss, metrics)`. Options: see the module. Raises ValueError for an unknown kl
    kind; on use, where the batch lacks what an option needs."""
    if kl_kind not in KINDS:
        raise ValueError(f"kl_kind must be one of {', '.join(KINDS)}, not {kl_kind!r}")
    return partial(
        _policy_gradient,
        surrogate=surrogate,
        kl=kl,
        kl_kind=kl_kind,
        entropy=entropy,
        correction=correction,
        on_policy=on_policy,
        measure_entropy=measure_entropy,
    )


def _ppo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, **options: Any
) -> TokenLoss:
    return ppo_clip(logprobs, old, advantages, mask, **options)


def _gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, **options: Any
) -> TokenLoss:
    return gspo(logprobs, old, advantages, mask, segments=segments, **options)


def _cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, **options: Any
) -> TokenLoss:
    return cispo(logprobs, old, advantages, mask, **options)


def _reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor) -> TokenLoss:
    return reinforce_term(logprobs, advantages, mask)


def grpo_loss(
    *, clip: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None, **options: Any
) -> Loss:
    """GRPO's and PPO's policy loss: `ppo_clip` with the module's shared options (kl, kl_kind, entropy, correction,
    on_policy, measure_entropy). DAPO: `clip_high=0.28`. The paper's GRPO: `kl=0.04, kl_kind="k3"`."""
    return surrogate_loss(partial(_ppo, clip=clip, clip_high=clip_high, dual_clip=dual_clip), **options)


ppo_loss = grpo_loss
"""PPO's policy loss is the same function; the advantages (`gae`) make the difference."""


def gspo_loss(*, clip: float = 3e-4, clip_high: float | None = 4e-4, per_token: bool = False, **options: Any) -> Loss:
    """`gspo` with the module's shared options; use "sequence" normalisation."""
    return surrogate_loss(partial(_gspo, clip=clip, clip_high=clip_high, per_token=per_token), **options)


def cispo_loss(*, max_ratio: float = 5.0, min_ratio: float = 0.0, **options: Any) -> Loss:
    """`cispo` with the module's shared options."""
    return surrogate_loss(partial(_cispo, max_ratio=max_ratio, min_ratio=min_ratio), **options)


def reinforce_loss(**options: Any) -> Loss:
    """`reinforce_term` with the module's shared options."""
    return surrogate_loss(_reinforce, **options)
