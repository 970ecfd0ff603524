"""Uses of the entropy: the bonus in the loss, and training only on the tokens where the policy hesitates."""

from __future__ import annotations

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, require_bool, same_shape


def entropy_bonus(entropy: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """`-coefficient * entropy` of each token, to be added to its loss; `[rows, seq]`, 0 outside the mask.

    The mask is the loss's own, so what is filtered (overlong, high-entropy only) is out of both, and the normaliser is
    the same. `entropy` is that of the full vocabulary (`token_entropy`). Raises ValueError where shapes differ.
    """
    return -coefficient * keep(entropy, mask)


def high_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float = 0.2) -> Tensor:
    """The trained tokens of highest entropy (Wang et al. 2025, arXiv 2506.01939): bool `[rows, seq]`, at least
    `fraction` of `mask`, all ties of the threshold included.

    The threshold is taken over all tokens given, so give it the whole batch, then make the weights from the new mask
    (`loss_weights`): dropped tokens must leave the divisor too. Raises ValueError for a fraction outside (0, 1] or
    wrong shapes.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], not {fraction}")
    require_bool(mask)
    same_shape(entropy=entropy, mask=mask)
    values = entropy.detach()[mask]
    if not values.numel():
        return mask.clone()
    count = max(1, -int(-fraction * values.numel() // 1))
    threshold = values.topk(count).values[-1]
    return mask & (torch.where(mask, entropy.detach(), -torch.inf) >= threshold)
