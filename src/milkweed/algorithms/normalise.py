"""What the loss is divided by, by name: the weights a batch carries, so that `sum(weights * token_loss)` is the loss.

The divisor is that of the whole global batch, so the loss and its gradient do not depend on how rows are split over
micro-batches and ranks, or packed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from milkweed.algorithms.masked import row_segments, segment_spread, segment_sum

Normalisation = Literal["token", "sequence", "constant"]


def loss_weights(
    mask: Tensor,
    how: Normalisation | tuple[Literal["constant"], float] = "token",
    *,
    segments: Tensor | None = None,
    constant: float | None = None,
    total: float | None = None,
) -> Tensor:
    """Weight of each token, float32 `[rows, seq]`, 0 outside the mask.

    "token": `1 / tokens`, every trained token counts alike (DAPO, Yu et al. 2025, arXiv 2503.14476).
    "sequence": `1 / (sequences * length)`, the mean over sequences of each one's mean (GRPO, Shao et al. 2024, arXiv
    2402.03300); sequences without trained tokens are not counted.
    "constant": `1 / (sequences * constant)`, the mean over sequences of the sum of each divided by one number, whatever
    its length; for Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) the length limit. Also written `("constant", c)`.

    `mask` bool and `segments` `[rows, seq]` (None: one sequence a row). `total` is the number of trained tokens
    ("token") or of sequences that have any (the others) in the global batch when `mask` holds only a part of it.
    Padding rows and filtered tokens are out of the mask, hence on neither side of the division. To let the segments
    of one trajectory count once under "sequence", pass trajectory ids as `segments`.

    Raises ValueError for an unknown name, a constant that is missing or not above 0, or wrong shapes.
    """
    if isinstance(how, tuple):
        how, constant = how
    segments = row_segments(mask, segments)
    if how == "token":
        return (mask / (mask.sum().clamp(min=1) if total is None else max(float(total), 1.0))).to(torch.float32)
    lengths = segment_sum(torch.ones_like(mask, dtype=torch.float64), mask, segments)
    sequences = (lengths > 0).sum().clamp(min=1) if total is None else max(float(total), 1.0)
    if how == "sequence":
        weights = segment_spread(1.0 / (lengths.clamp(min=1) * sequences), mask, segments)
    elif how == "constant":
        if constant is None or not constant > 0:
            raise ValueError(f"normalisation 'constant' needs a number above 0, not {constant}")
        weights = mask / (float(constant) * sequences)
    else:
        raise ValueError(f"normalisation must be 'token', 'sequence' or ('constant', c), not {how!r}")
    return weights.to(torch.float32)
