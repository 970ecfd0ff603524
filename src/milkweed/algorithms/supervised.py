"""Supervised fine-tuning: which tokens are trained, and their loss."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from milkweed.algorithms.masked import keep, same_shape
from milkweed.algorithms.policy_loss import TokenLoss
from milkweed.types import Batch, Loss, PolicyOutput


def supervised_mask(
    completion: Tensor, segments: Tensor, include: Literal["completion", "all"] = "completion"
) -> Tensor:
    """The tokens that SFT trains: bool `[rows, seq]`.

    `completion` bool `[rows, seq]`: tokens of the answer; `segments` int64, -1 on padding. "completion" trains these,
    its first token included; "all" every token; never the first of a sequence (nothing precedes it) nor padding.
    Tensors are aligned with tokens, so nothing is shifted here. Raises ValueError for an unknown name or wrong
    shapes.
    """
    same_shape(completion=completion, segments=segments)
    if include not in ("completion", "all"):
        raise ValueError(f"include must be 'completion' or 'all', not {include!r}")
    preceded = torch.zeros_like(segments, dtype=torch.bool)
    preceded[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return preceded & completion if include == "completion" else preceded


def negative_log_likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """`-log pi` of each token, `[rows, seq]`, 0 outside the mask. Raises ValueError where shapes differ."""
    return -keep(logprobs, mask)


def _sft(batch: Batch, policy: PolicyOutput, *, measure_entropy: bool) -> TokenLoss:
    if batch.totals.get("tokens", 1) == 0:
        warnings.warn(
            "no token of this batch is trained (all labels are masked), so its loss is 0", RuntimeWarning, stacklevel=2
        )
    loss = negative_log_likelihood(policy.logprobs, batch.mask)
    metrics = {"nll": loss.detach()}
    if measure_entropy:
        with torch.no_grad():
            metrics["entropy"] = keep(policy.entropy(), batch.mask)
    return TokenLoss(loss, metrics)


def sft_loss(*, measure_entropy: bool = False) -> Loss:
    """Cross-entropy of the trained tokens: `-log pi(token)`, as a `Loss`; metric `nll` (and `entropy`).

    A batch whose `totals["tokens"]` is 0 gives loss 0 and a warning.
    """
    return partial(_sft, measure_entropy=measure_entropy)
