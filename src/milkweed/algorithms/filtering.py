"""Which groups are worth training on: those whose raw rewards differ."""

from __future__ import annotations

from torch import Tensor

from milkweed.algorithms.groups import arrange


def has_signal(
    raw_rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None, trajectories: Tensor | None = None
) -> Tensor:
    """Bool `[n]`: the entry is valid and its group has at least two members with different rewards.

    Give it the rewards as the verifier returned them: shaping (length, format, KL) makes equal groups look varied.
    A NaN reward counts as different, so that it surfaces in the advantages instead of being dropped here. Arguments as
    in `advantages`. Raises ValueError for wrong shapes.
    """
    g = arrange(raw_rewards, groups, valid, trajectories)
    return (~g.constant & (g.size > 1))[g.of] & g.valid


def dynamic_sampling(
    raw_rewards: Tensor,
    groups: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476): bool `[n]`, the entries of groups to train on; sample
    more prompts until there are enough.

    A group is kept if its raw rewards differ and, with bounds, its mean raw reward lies strictly between `low` and
    `high`. Raises ValueError where `low >= high`, or for wrong shapes.
    """
    if low is not None and high is not None and not low < high:
        raise ValueError(f"dynamic sampling needs low < high, not {low} and {high}")
    g = arrange(raw_rewards, groups, valid, trajectories)
    kept = ~g.constant & (g.size > 1)
    if low is not None:
        kept = kept & ~(g.mean <= low)
    if high is not None:
        kept = kept & ~(g.mean >= high)
    return kept[g.of] & g.valid


def signal_fraction(raw_rewards: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> float:
    """Share of groups (with any valid member) whose raw rewards differ: a metric of how much there is to learn."""
    g = arrange(raw_rewards, groups, valid, None)
    counted = g.size > 0
    total = int(counted.sum())
    return int((~g.constant & (g.size > 1) & counted).sum()) / total if total else 0.0
