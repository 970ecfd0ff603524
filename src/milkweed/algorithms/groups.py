"""Rewards by group: ids, missing scores, and the statistics that advantages and filters share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from milkweed.algorithms.masked import require_bool, same_shape


def group_ids(ids: Iterable[Hashable]) -> Tensor:
    """Int64 `[n]`: a number for each distinct id, in order of first sight. Pass the prompt's or group's id."""
    seen: dict[Hashable, int] = {}
    return torch.tensor([seen.setdefault(i, len(seen)) for i in ids], dtype=torch.int64)


def scored(rewards: Iterable[float | None]) -> tuple[Tensor, Tensor]:
    """Rewards of which some are None (never scored) as `(rewards, valid)`, float64 and bool `[n]`. A missing reward is
    left out, never taken as 0."""
    given = list(rewards)
    values = torch.tensor([0.0 if r is None else float(r) for r in given], dtype=torch.float64)
    return values, torch.tensor([r is not None for r in given], dtype=torch.bool)


def require_group_size(size: int, algorithm: str = "grpo") -> None:
    """Raise ValueError for a group size that gives no baseline (below 2); for use when a configuration is read."""
    if size < 2:
        raise ValueError(
            f"{algorithm} compares the samples of one prompt, so a group needs at least 2 of them, not {size}: raise "
            "the group size, or use reinforce or reinforce_plus_plus, which need no group"
        )


class Groups(NamedTuple):
    """Rewards arranged by group, with the statistics of what counts."""

    rewards: Tensor  # float64 [n], 0 where not valid
    of: Tensor  # group of each entry, [n], 0 .. groups-1
    use: Tensor  # bool [n], entries that count in the statistics
    valid: Tensor
    size: Tensor  # entries that count, float64 [groups]
    mean: Tensor  # float64 [groups]
    constant: Tensor  # bool [groups]


def arrange(rewards: Tensor, groups: Tensor, valid: Tensor | None, trajectories: Tensor | None) -> Groups:
    """Checks the arguments that `advantages` describes and takes the statistics, in float64, over valid entries, each
    trajectory once. Raises ValueError for wrong shapes or segments of a trajectory that disagree."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be one a trajectory, [n], not {tuple(rewards.shape)}")
    same_shape(rewards=rewards, groups=groups, valid=valid, trajectories=trajectories)
    if groups.is_floating_point():
        raise ValueError(f"groups must be integer ids, not {groups.dtype}: make them with group_ids")
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    require_bool(valid, "valid")
    x = torch.where(valid, rewards, torch.zeros_like(rewards)).to(torch.float64)
    index = torch.unique(groups, return_inverse=True)[1]
    use = valid.clone()
    if trajectories is not None:
        first: dict[int, int] = {}
        for i, (t, ok) in enumerate(zip(trajectories.tolist(), valid.tolist(), strict=True)):
            if not ok:
                continue
            j = first.setdefault(t, i)
            if j == i:
                continue
            use[i] = False
            if index[i] != index[j] or (x[i] != x[j] and not (x[i].isnan() and x[j].isnan())):
                raise ValueError(f"entries {j} and {i} are segments of trajectory {t} but differ in reward or group")
    n = int(index.max()) + 1 if index.numel() else 0
    counted = use.to(torch.float64)
    count = x.new_zeros(n).index_add(0, index, counted)
    mean = x.new_zeros(n).index_add(0, index, x * counted) / count.clamp(min=1)
    high = x.new_full((n,), -torch.inf).scatter_reduce(0, index, torch.where(use, x, -torch.inf), "amax")
    low = x.new_full((n,), torch.inf).scatter_reduce(0, index, torch.where(use, x, torch.inf), "amin")
    return Groups(x, index, use, valid, count, mean, high == low)
