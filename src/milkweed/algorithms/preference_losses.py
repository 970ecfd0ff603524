"""Preference losses as `Loss` functions over packed batches.

What they read: `batch.extra["pair"]` int64 `[rows, seq]`, the pair that a sequence belongs to, on each of its tokens
(-1 on padding), and `batch.extra["chosen"]` bool, whether it is the preferred one; `batch.totals["pairs"]`, the pairs
of the global batch, which the sum is divided by. Both sequences of a pair must be in one row, so that no split over
micro-batches or ranks can part them. They return a scalar, this micro-batch's share of the loss, and metrics `[rows,
seq]` with the same value on each trained token of a pair, so their means are weighted by length.
`extra["reference_logprobs"]` holds the reference's. `mask` sets the completion tokens; `weights` are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from milkweed.algorithms.critic import ValueOutput, last_values
from milkweed.algorithms.masked import segment_spread, segment_sum
from milkweed.algorithms.preference import PairLoss, bradley_terry, dpo, ipo, kto, orpo, sequence_logprobs, simpo
from milkweed.types import Batch, Loss, PolicyOutput


def _extra(batch: Batch, name: str) -> Tensor:
    if name not in batch.extra:
        raise ValueError(f"this loss needs batch.extra[{name!r}], [rows, seq]")
    return batch.extra[name]


def _total(batch: Batch, name: str) -> float:
    if not batch.totals.get(name, 0) > 0:
        raise ValueError(f"this loss needs batch.totals[{name!r}]: the {name} of the whole global batch, above 0")
    return float(batch.totals[name])


def pair_members(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """`(chosen, rejected, pairs)`, int64 `[pairs]`: the segment ids of each pair's two sequences, and the pair's id.

    Raises ValueError where `extra` lacks what the module describes, or a pair has not exactly one of each here.
    """
    pair, chosen = _extra(batch, "pair"), _extra(batch, "chosen").bool()
    here = batch.mask & (pair >= 0)
    rows = torch.stack([pair[here], chosen[here].to(pair.dtype), batch.segments[here]], dim=1).unique(dim=0)
    kept, wanted = rows[rows[:, 1] == 1], rows[rows[:, 1] == 0]
    if kept.shape != wanted.shape or not torch.equal(kept[:, 0], wanted[:, 0]) or len(kept[:, 0].unique()) != len(kept):
        ids, counts = rows[:, 0].unique(return_counts=True)
        broken = ids[counts != 2].tolist()[:5]
        raise ValueError(
            f"pairs {broken or ids.tolist()[:5]} have not one chosen and one rejected sequence here: pack both in a row"
        )
    return kept[:, 2], wanted[:, 2], kept[:, 0]


def _share(batch: Batch, out: PairLoss, pairs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    pair = _extra(batch, "pair")
    count = int(pairs.max()) + 1 if len(pairs) else 0

    def spread(values: Tensor) -> Tensor:
        by_pair = torch.zeros(count, dtype=values.dtype, device=values.device)
        by_pair[pairs] = values.detach()
        return segment_spread(by_pair, batch.mask & (pair >= 0), pair)

    metrics = {
        "pair_loss": spread(out.loss),
        "chosen_reward": spread(out.chosen_rewards),
        "rejected_reward": spread(out.rejected_rewards),
        "reward_margin": spread(out.chosen_rewards - out.rejected_rewards),
        "preference_accuracy": spread((out.chosen_rewards > out.rejected_rewards).to(out.loss.dtype)),
    }
    return out.loss.sum() / _total(batch, "pairs"), metrics


def _pairwise(
    batch: Batch, policy: PolicyOutput, *, loss: Callable[..., PairLoss], per_token: bool, reference: bool
) -> Any:
    chosen, rejected, pairs = pair_members(batch)
    own = sequence_logprobs(policy.logprobs, batch.mask, batch.segments, per_token=per_token)
    args = [own[chosen], own[rejected]]
    if reference:
        other = sequence_logprobs(_extra(batch, "reference_logprobs"), batch.mask, batch.segments, per_token=per_token)
        args += [other[chosen], other[rejected]]
    return _share(batch, loss(*args), pairs)


def dpo_loss(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """`dpo` (with `label_smoothing`, cDPO) as a `Loss`, log-probs summed over each completion."""
    return partial(
        _pairwise, loss=partial(dpo, beta=beta, label_smoothing=label_smoothing), per_token=False, reference=True
    )


def ipo_loss(*, beta: float = 0.1, per_token: bool = True) -> Loss:
    """`ipo` as a `Loss`, on mean log-probs per token; `per_token=False` for the paper's sums."""
    return partial(_pairwise, loss=partial(ipo, beta=beta), per_token=per_token, reference=True)


def orpo_loss(*, beta: float = 0.1) -> Loss:
    """`orpo` as a `Loss`, on mean log-probs per token."""
    return partial(_pairwise, loss=partial(orpo, beta=beta), per_token=True, reference=False)


def simpo_loss(*, beta: float = 2.0, margin: float = 1.0) -> Loss:
    """`simpo` as a `Loss`, on mean log-probs per token."""
    return partial(_pairwise, loss=partial(simpo, beta=beta, margin=margin), per_token=True, reference=False)


def _kto(batch: Batch, policy: PolicyOutput, *, beta: float, desirable_weight: float, undesirable_weight: float) -> Any:
    count = int(batch.segments.max()) + 1 if batch.segments.numel() else 0
    lengths = segment_sum(torch.ones_like(batch.weights), batch.mask, batch.segments, count)
    here = lengths > 0
    own = sequence_logprobs(policy.logprobs, batch.mask, batch.segments, count=count)
    other = sequence_logprobs(_extra(batch, "reference_logprobs"), batch.mask, batch.segments, count=count)
    desirable = segment_sum(_extra(batch, "desirable").to(own.dtype), batch.mask, batch.segments, count) > 0
    losses = kto(
        own,
        other,
        desirable,
        beta=beta,
        reference_point=batch.totals.get("kto_reference_point", 0.0),
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    loss = losses[here].sum() / _total(batch, "sequences")
    return loss, {"sequence_loss": segment_spread(losses.detach(), batch.mask, batch.segments)}


def kto_loss(*, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Loss:
    """`kto` as a `Loss`: `extra["desirable"]` bool `[rows, seq]` on each sequence's tokens; the mean over
    `totals["sequences"]`. The reference point is `totals["kto_reference_point"]` (0 if not there), one number for the
    whole global batch, so the loss does not depend on how it is split."""
    return partial(_kto, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)


def _reward_model(batch: Batch, output: ValueOutput, *, centre: float) -> Any:
    chosen, rejected, pairs = pair_members(batch)
    scores = last_values(output.values, batch.mask, batch.segments)
    margin = None
    if "margin" in batch.extra:
        margin = last_values(batch.extra["margin"], batch.mask, batch.segments)[chosen]
    return _share(batch, bradley_terry(scores[chosen], scores[rejected], margin=margin, centre=centre), pairs)


def reward_model_loss(*, centre: float = 0.0) -> Loss:
    """`bradley_terry` as a `Loss` for a model whose output is a `ValueOutput`: the score is the head at the last
    trained token of each sequence. `extra["margin"]` `[rows, seq]`, if there, is read at the chosen one's last
    token."""
    return partial(_reward_model, centre=centre)
