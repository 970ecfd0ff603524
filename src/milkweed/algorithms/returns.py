"""Returns and advantages along the tokens of a trajectory: reward to go, and GAE over a critic's values.

Time counts trained tokens only: tokens that the policy did not sample (prompt, tool output, padding) are stepped over
as if they were not there, and nothing on them (reward, value, NaN) is used.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from milkweed.algorithms.masked import count_segments, keep, row_segments, same_shape, segment_last, segment_spread


class Returns(NamedTuple):
    """`advantages` and `returns` (targets of the critic), both `[rows, seq]`, 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


def _unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], not {value}")


def _ends(segments: Tensor) -> Tensor:
    """Bool `[rows, seq]`: the next token belongs to another sequence, or there is none."""
    ends = torch.ones_like(segments, dtype=torch.bool)
    ends[:, :-1] = segments[:, 1:] != segments[:, :-1]
    return ends


def place_outcomes(outcomes: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """Rewards of whole sequences `[n]` (by segment id) put on each one's last trained token; `[rows, seq]`, else 0."""
    return segment_spread(outcomes, segment_last(mask, segments), segments)


def discounted_returns(
    rewards: Tensor, mask: Tensor, *, discount: float = 1.0, segments: Tensor | None = None
) -> Tensor:
    """Reward to go: `R_t = r_t + discount * R_(t+1)` over the trained tokens of each sequence; all `[rows, seq]`.

    Raises ValueError for wrong shapes or a discount outside [0, 1].
    """
    _unit("discount", discount)
    segments = row_segments(mask, segments)
    r, ends = keep(rewards, mask), _ends(segments)
    columns: list[Tensor] = []
    carry = r.new_zeros(r.shape[0])
    for t in range(r.shape[1] - 1, -1, -1):
        carry = torch.where(ends[:, t], torch.zeros_like(carry), carry)
        carry = torch.where(mask[:, t], r[:, t] + discount * carry, carry)
        columns.append(carry)
    return keep(torch.stack(columns[::-1], dim=1), mask) if columns else r


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    discount: float = 1.0,
    trace: float = 1.0,
    segments: Tensor | None = None,
    terminal: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    on_truncation: Literal["terminal", "bootstrap"] = "terminal",
) -> Returns:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438).

    `delta_t = r_t + discount * V_(t+1) - V_t`, `A_t = delta_t + discount * trace * A_(t+1)`, `returns = A + V`, where
    t + 1 is the next *trained* token of the same sequence: a tool's output in between neither discounts nor bootstraps.

    `rewards`, `values`, `mask`, `segments` `[rows, seq]`; `values[t]` is the value of the state in which token t was
    chosen. `terminal` `[n]` (by segment id) is added to the reward of each sequence's last trained token. After that
    token the value is 0, except, with `on_truncation="bootstrap"`, for the sequences marked in `truncated` `[n]` bool
    (cut by a length limit, not ended): for them it is `bootstrap` `[n]`, the value of the state they were left in. With
    "terminal" (the default) a cut sequence is treated as ended. Gradients do not flow.

    Raises ValueError for wrong shapes, discount or trace outside [0, 1], or "bootstrap" without the tensors it needs.
    """
    _unit("discount", discount)
    _unit("trace", trace)
    same_shape(rewards=rewards, values=values, mask=mask)
    segments = row_segments(mask, segments)
    r, v = keep(rewards.detach(), mask), keep(values.detach(), mask)
    if terminal is not None:
        r = r + place_outcomes(terminal.detach(), mask, segments)
    after = r.new_zeros(r.shape)
    if on_truncation == "bootstrap":
        if truncated is None or bootstrap is None:
            raise ValueError("on_truncation='bootstrap' needs both truncated and bootstrap, one entry a sequence")
        same_shape(truncated=truncated, bootstrap=bootstrap)
        if len(bootstrap) < count_segments(segments):
            raise ValueError(f"bootstrap has {len(bootstrap)} entries for {count_segments(segments)} sequences")
        final = torch.where(truncated, bootstrap.detach().to(r.dtype), torch.zeros((), dtype=r.dtype, device=r.device))
        after = final[segments.clamp(min=0)]
    elif on_truncation != "terminal":
        raise ValueError(f"on_truncation must be 'terminal' or 'bootstrap', not {on_truncation!r}")
    ends = _ends(segments)
    columns: list[Tensor] = []
    carry, following = r.new_zeros(r.shape[0]), r.new_zeros(r.shape[0])
    for t in range(r.shape[1] - 1, -1, -1):
        carry = torch.where(ends[:, t], torch.zeros_like(carry), carry)
        following = torch.where(ends[:, t], after[:, t], following)
        advantage = r[:, t] + discount * following - v[:, t] + discount * trace * carry
        carry = torch.where(mask[:, t], advantage, carry)
        following = torch.where(mask[:, t], v[:, t], following)
        columns.append(carry)
    advantages = keep(torch.stack(columns[::-1], dim=1), mask) if columns else r
    return Returns(advantages, keep(advantages + v, mask))
