"""Completions cut by the length limit: leaving them out of the loss, and a penalty that grows before the limit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from milkweed.algorithms.masked import require_bool, row_segments, same_shape
from milkweed.types import FinishReason


def cut_by_length(finish_reasons: Iterable[FinishReason]) -> Tensor:
    """Bool `[n]`: the engine stopped it at the limit. Decided by the finish reason, never by the last token: models end
    with more than one token."""
    return torch.tensor([reason == "length" for reason in finish_reasons], dtype=torch.bool)


def overlong_mask(mask: Tensor, truncated: Tensor, segments: Tensor | None = None) -> Tensor:
    """`mask` without the sequences marked in `truncated` (DAPO's overlong filtering, Yu et al. 2025, arXiv 2503.14476).

    `mask`, `segments` `[rows, seq]`, `truncated` bool `[n]` by segment id; result bool `[rows, seq]`. Use it for every
    term of the loss and for the normaliser. Raises ValueError for wrong shapes or a segment without an entry.
    """
    segments = row_segments(mask, segments)
    require_bool(truncated, "truncated")
    if bool((mask & (segments >= len(truncated))).any()):
        raise ValueError(f"segments name sequence {int(segments.max())}, but truncated has {len(truncated)} entries")
    return mask & ~truncated[segments.clamp(min=0, max=max(len(truncated) - 1, 0))] if len(truncated) else mask.clone()


def soft_penalty(
    lengths: Tensor, limit: int, buffer: int, *, factor: float = 1.0, truncated: Tensor | None = None
) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476), to be added to the reward; float32 `[n]`.

    0 up to `limit - buffer` tokens, then falling in a straight line to `-factor` at `limit` and beyond. `lengths` `[n]`
    in completion tokens. `buffer` 0 means no penalty at all. With `truncated` (bool `[n]`), those cut at the limit get
    the full `-factor`. Raises ValueError where the buffer is negative or above the limit.
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"overlong buffer must lie in [0, limit {limit}], not {buffer}")
    lengths = lengths.to(torch.float32)
    if buffer == 0:
        return torch.zeros_like(lengths)
    penalty = -((lengths - (limit - buffer)) / buffer).clamp(0.0, 1.0) * factor
    if truncated is not None:
        require_bool(truncated, "truncated")
        same_shape(lengths=lengths, truncated=truncated)
        penalty = torch.where(truncated, -float(factor), penalty)
    return penalty + 0.0  # no negative zeros
