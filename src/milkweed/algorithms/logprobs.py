"""From logits to what the losses use: log-probs, entropy and top-k log-probs, temperature applied in one place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from milkweed.algorithms.masked import as_float, keep, shift_to_tokens


def temper(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`logits / temperature` in at least float32; temperature 0 (greedy) leaves them, as the engine's log-probs do.

    For a policy's logits only: a critic's values have no temperature. Raises ValueError for a negative or non-finite
    temperature.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be 0 (greedy) or above, not {temperature}")
    logits = as_float(logits)
    return logits if temperature in (0.0, 1.0) else logits / temperature


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, segments: Tensor | None = None
) -> Tensor:
    """`log softmax(logits[t - 1] / temperature)[tokens[t]]`: the log-prob of each token given those before it.

    `logits` `[rows, seq, vocab]` as the model returns them (position t speaks of token t + 1), `tokens` int64 and
    `segments` `[rows, seq]`; result `[rows, seq]` aligned with `tokens`, 0 at the first token of each sequence. Over
    the full vocabulary. Raises ValueError where shapes differ or for a bad temperature.
    """
    if logits.shape[:2] != tokens.shape:
        raise ValueError(f"shapes differ: logits {tuple(logits.shape)}, tokens {tuple(tokens.shape)}")
    scaled = temper(logits, temperature)
    following = torch.zeros_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    chosen = scaled.gather(-1, following.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)
    return shift_to_tokens(chosen, segments)


def token_entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """`-sum_v p_v log p_v` over the full vocabulary, in nats; `[rows, seq, vocab]` to `[rows, seq]`.

    At the place of its logits: give it logits already aligned with the tokens, or move the result with
    `shift_to_tokens`. Never estimated from sampled tokens. Words ruled out (-inf) add 0. 0 outside `mask`.
    Raises ValueError where shapes differ.
    """
    logits = as_float(logits) if mask is None else keep(logits, mask.unsqueeze(-1).expand(logits.shape))
    log = logits.log_softmax(-1)
    log = torch.where(log == -torch.inf, torch.zeros((), dtype=log.dtype, device=log.device), log)
    p = logits.softmax(-1)
    result = -(p * log).sum(-1)
    return result if mask is None else keep(result, mask)
