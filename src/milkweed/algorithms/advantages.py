"""Advantages from the rewards of whole trajectories: one number a trajectory, compared within its group.

Shared meaning of the arguments. `rewards` `[n]`: one an entry. `groups` `[n]` int64: entries with one id share a
baseline (by id, never by content; `groups.group_ids` makes them). `valid` `[n]` bool: entries left out (failed,
unscored, empty) get advantage 0 and do not enter any statistic. `trajectories` `[n]` int64: entries with one id are
segments of one trajectory, carry the same reward, and count once.

Statistics are taken in float64. A group in which all rewards are equal gets exactly 0. A group of one has no baseline:
`single` says whether its advantage is "zero", the "raw" reward, or whether to "refuse" (ValueError); if no group at all
has two members, "zero" warns, because such a run would learn nothing.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from milkweed.algorithms.groups import Groups, arrange
from milkweed.algorithms.masked import as_float, keep, row_segments, same_shape, segment_spread, segment_sum, whiten
from milkweed.algorithms.returns import discounted_returns

Std = Literal["population", "unbiased", "none"]
Single = Literal["zero", "raw", "refuse"]


def _settle(advantages: Tensor, g: Groups, single: Single, like: Tensor) -> Tensor:
    """Exact zeros for groups without signal, the rule for groups of one, 0 for entries left out, the caller's type."""
    if single not in ("zero", "raw", "refuse"):
        raise ValueError(f"single must be 'zero', 'raw' or 'refuse', not {single!r}")
    alone = g.size == 1
    if bool(alone.any()):
        if single == "refuse":
            raise ValueError(f"{int(alone.sum())} of {len(g.size)} groups have one member, so they have no baseline")
        if single == "zero" and not bool((g.size > 1).any()):
            warnings.warn(
                "every group has one member, so every advantage is 0: group ids must name the prompt, not the sample",
                RuntimeWarning,
                stacklevel=3,
            )
    advantages = torch.where(g.constant[g.of], torch.zeros_like(advantages), advantages)
    if single == "raw":
        advantages = torch.where(alone[g.of], g.rewards, advantages)
    advantages = torch.where(g.valid, advantages, torch.zeros_like(advantages))
    return advantages.to(as_float(like).dtype)


def _spread(values: Tensor, kind: Std) -> Tensor:
    if kind not in ("population", "unbiased"):
        raise ValueError(f"std must be 'population', 'unbiased' or 'none', not {kind!r}")
    return values.std(correction=1 if kind == "unbiased" else 0)


def grpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    std: Std = "unbiased",
    scale: Literal["group", "batch"] = "group",
    epsilon: float = 1e-6,
    single: Single = "zero",
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): `A_i = (r_i - mean(group)) / (std + epsilon)`; result `[n]`.

    `std` is the standard deviation with `n` ("population") or `n - 1` ("unbiased") below, or "none" for no division
    (see `dr_grpo`). `scale` says over what it is taken: the rewards of the entry's "group", or all rewards of the
    "batch" (the baseline stays the group's mean). Other arguments: see the module.
    Raises ValueError for wrong shapes, unknown names, refused groups, or segments of a trajectory that disagree.
    """
    g = arrange(rewards, groups, valid, trajectories)
    centred = g.rewards - g.mean[g.of]
    if scale not in ("group", "batch"):
        raise ValueError(f"scale must be 'group' or 'batch', not {scale!r}")
    if std == "none":
        pass
    elif scale == "batch":
        used = g.rewards[g.use]
        centred = centred / (_spread(used, std) + epsilon) if len(used) > 1 else torch.zeros_like(centred)
    else:
        if std not in ("population", "unbiased"):
            raise ValueError(f"std must be 'population', 'unbiased' or 'none', not {std!r}")
        squares = torch.zeros_like(g.mean).index_add(0, g.of, torch.where(g.use, centred.square(), 0.0))
        below = (g.size - int(std == "unbiased")).clamp(min=1)
        centred = centred / ((squares / below).sqrt() + epsilon)[g.of]
    return _settle(centred, g, single, rewards)


def dr_grpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    single: Single = "zero",
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): `A_i = r_i - mean(group)`; result `[n]`.

    Its other half is the "constant" normalisation of the loss (`loss_weights`). Raises as `grpo` does.
    """
    return grpo(rewards, groups, std="none", single=single, valid=valid, trajectories=trajectories)


def rloo(
    rewards: Tensor,
    groups: Tensor,
    *,
    std: Std = "none",
    epsilon: float = 1e-6,
    single: Single = "zero",
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740): `A_i = r_i - mean(the other members of the group)`; `[n]`.

    With `std`, divided by the standard deviation of those others (plus `epsilon`); where it is not above `epsilon`
    (they are equal, if only up to rounding, or there is one) it says nothing about scale and the difference is left as
    it is. Raises as `grpo` does.
    """
    g = arrange(rewards, groups, valid, trajectories)
    others = (g.size - 1).clamp(min=1)[g.of]
    advantages = (g.rewards - g.mean[g.of]) * g.size[g.of] / others
    if std != "none":
        if std not in ("population", "unbiased"):
            raise ValueError(f"std must be 'population', 'unbiased' or 'none', not {std!r}")
        scale = torch.ones_like(advantages)
        for group in range(len(g.size)):
            members = torch.nonzero((g.of == group) & g.use).flatten()
            k = len(members)
            if k < 3:
                continue
            left = (
                g.rewards[members].expand(k, k)[~torch.eye(k, dtype=torch.bool, device=members.device)].view(k, k - 1)
            )
            spread = left.std(1, correction=1 if std == "unbiased" else 0)
            scale[members] = torch.where(spread <= epsilon, torch.ones_like(spread), spread + epsilon)
        if trajectories is not None:  # the later segments of a trajectory take the scale of its first
            first = {t: i for i, t in reversed(list(enumerate(trajectories.tolist()))) if bool(g.use[i])}
            scale = scale[
                torch.tensor([first.get(t, i) for i, t in enumerate(trajectories.tolist())], device=scale.device)
            ]
        advantages = advantages / scale
    return _settle(advantages, g, single, rewards)


def maxrl(
    rewards: Tensor,
    groups: Tensor,
    *,
    single: Single = "zero",
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """MaxRL (Tajwar et al. 2026, arXiv 2602.02710): `A_i = (r_i - mean(group)) / mean(group)`; `[n]`.

    For rewards of 0 and 1 it follows the gradient of log pass rate instead of pass rate. A group without success gets
    0. Raises ValueError where a reward is negative, and as `grpo` does.
    """
    g = arrange(rewards, groups, valid, trajectories)
    if bool((g.rewards < 0).any()):
        raise ValueError("maxrl needs rewards of 0 or above (a pass rate), and one is negative")
    mean = g.mean[g.of]
    safe = torch.where(mean == 0, torch.ones_like(mean), mean)
    return _settle((g.rewards - mean) / safe, g, single, rewards)


def reinforce(
    rewards: Tensor,
    groups: Tensor | None = None,
    *,
    baseline: Literal["none", "batch"] = "none",
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
) -> Tensor:
    """REINFORCE (Williams 1992): `A_i = r_i`, or `r_i - mean(all rewards)` with the "batch" baseline; `[n]`.

    `groups` is not used: it is there so that this fits where a function of (rewards, groups) is wanted. A baseline by
    group is `dr_grpo`. Raises ValueError for wrong shapes, an unknown baseline, or segments of a trajectory that
    disagree.
    """
    same_shape(rewards=rewards, groups=groups)
    g = arrange(rewards, torch.zeros_like(rewards, dtype=torch.int64), valid, trajectories)
    if baseline == "none":
        return torch.where(g.valid, g.rewards, 0.0).to(as_float(rewards).dtype)
    if baseline != "batch":
        raise ValueError(f"baseline must be 'none' or 'batch', not {baseline!r}")
    centred = torch.where(g.constant[g.of] | ~g.valid, 0.0, g.rewards - g.mean[g.of])
    return centred.to(as_float(rewards).dtype)


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    *,
    segments: Tensor | None = None,
    discount: float = 1.0,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the discounted rewards still to come at each token, whitened over
    all trained tokens of the batch; `[rows, seq]`, 0 outside the mask.

    `rewards` `[rows, seq]` a token: the outcome on the last trained one, minus the KL penalty on each (`kl_in_reward`
    makes them). What stands on masked tokens is never used. `group`: see `whiten`. Raises ValueError for wrong shapes.
    """
    return whiten(discounted_returns(rewards, mask, discount=discount, segments=segments), mask, group=group)


def reinforce_plus_plus_baseline(
    rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    segments: Tensor | None = None,
    valid: Tensor | None = None,
    trajectories: Tensor | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """REINFORCE++ with group baseline (Hu et al. 2025, arXiv 2501.03262): `r_i - mean(group)` on each token of the
    trajectory, whitened over all trained tokens of the batch; `[rows, seq]`, 0 outside the mask.

    `rewards`, `groups` `[n]` by segment id; `mask`, `segments` `[rows, seq]` (None: one sequence a row). `group`: the
    ranks whose tokens are whitened together, see `whiten`. Raises as `grpo` does.
    """
    centred = dr_grpo(rewards, groups, valid=valid, trajectories=trajectories)
    return whiten(per_token(centred, mask, segments), mask, group=group)


def per_token(advantages: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """A sequence's advantage on each of its own trained tokens: `[n]` by segment id to `[rows, seq]`, 0 elsewhere.

    Steps of one trajectory that are trained as separate sequences each use their own mask. Raises ValueError where a
    trained token's segment has no advantage.
    """
    return segment_spread(advantages, mask, segments)


def outcomes(token_rewards: Tensor, mask: Tensor, segments: Tensor | None = None, count: int | None = None) -> Tensor:
    """The reward of each sequence from rewards on tokens: their sum over trained tokens; `[rows, seq]` to `[n]`.

    A reward on a token that the mask leaves out is not used: what is not trained earns nothing.
    """
    return segment_sum(keep(token_rewards, mask), mask, row_segments(mask, segments), count)
