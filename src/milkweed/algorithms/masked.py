"""Sums and means over masked tokens and over the sequences of packed rows; every other module here stands on these.

NaN rule, kept by all of `algorithms`: what a mask leaves out is replaced by 0 before any arithmetic, so NaN or infinity
there reaches neither a value nor a gradient; NaN inside the mask comes out as NaN. (Replacing afterwards is not enough:
the gradient would be 0 times NaN.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_float(x: Tensor) -> Tensor:
    """`x` in a type that sums can be trusted in: half precision, integers and bools become float32; float32 and
    float64 stay."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all the tensors given (None is skipped) have one shape: nothing here broadcasts."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


def require_bool(mask: Tensor, name: str = "mask") -> None:
    """Raise ValueError unless `mask` is a bool tensor: a float mask would silently weigh tokens."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, not {mask.dtype}")


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask`, 0 elsewhere; also the gradient is exactly 0 elsewhere. Same shapes, any rank; float out.

    Raises ValueError where the shapes differ or the mask is not bool.
    """
    require_bool(mask)
    same_shape(x=x, mask=mask)
    x = as_float(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask`, over `dim` or over everything. NaN outside the mask is ignored, inside it surfaces.

    Raises ValueError where the shapes differ or the mask is not bool.
    """
    kept = keep(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask`, over `dim` or over everything; 0 (with zero gradient) where the mask is empty.

    Raises ValueError where the shapes differ or the mask is not bool.
    """
    total = masked_sum(x, mask, dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1).to(total.dtype)


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance of `x` where `mask`: `sum((x - mean)^2) / (n - 1)`, or `/ n` when not `unbiased`. 0 for fewer than two.

    Raises ValueError where the shapes differ or the mask is not bool.
    """
    centred = keep(x, mask) - masked_mean(x, mask)
    total = masked_sum(centred.square(), mask)
    count = mask.sum() - int(unbiased)
    return total / count.clamp(min=1).to(total.dtype)


def row_segments(mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """`segments` if given (checked against `mask`, both `[rows, seq]`), else one sequence a row: the row's index.

    Raises ValueError where the shapes differ, the mask is not bool or has not two dimensions, or a trained token lies
    outside all segments.
    """
    require_bool(mask)
    if mask.dim() != 2:
        raise ValueError(f"mask must be [rows, seq], not {tuple(mask.shape)}")
    if segments is None:
        return torch.arange(mask.shape[0], device=mask.device)[:, None].expand(mask.shape)
    same_shape(mask=mask, segments=segments)
    if bool((mask & (segments < 0)).any()):
        raise ValueError("mask is set on a token whose segment is -1 (padding)")
    return segments


def count_segments(segments: Tensor) -> int:
    """One more than the largest segment id; 0 if there is only padding."""
    return int(segments.max()) + 1 if segments.numel() else 0


def segment_sum(x: Tensor, mask: Tensor, segments: Tensor | None = None, count: int | None = None) -> Tensor:
    """Sum of `x` over the trained tokens of each sequence.

    `x`, `mask`, `segments` `[rows, seq]`, segments -1 on padding (None: one sequence a row); result `[count]`, indexed
    by segment id, 0 for a sequence without trained tokens. `count` defaults to the largest id plus one.
    Raises ValueError where the shapes differ or the mask is not bool.
    """
    segments = row_segments(mask, segments)
    kept = keep(x, mask)
    count = count_segments(segments) if count is None else count
    if not count:
        return kept.reshape(-1)[:0]  # a micro-batch of padding alone must still have a gradient, of zeros
    index = segments.clamp(min=0).reshape(-1)
    return torch.zeros(count, dtype=kept.dtype, device=kept.device).index_add(0, index, kept.reshape(-1))


def segment_mean(x: Tensor, mask: Tensor, segments: Tensor | None = None, count: int | None = None) -> Tensor:
    """Mean of `x` over the trained tokens of each sequence; shapes as in `segment_sum`, 0 where none is trained."""
    lengths = segment_sum(torch.ones_like(mask, dtype=torch.float32), mask, segments, count)
    total = segment_sum(x, mask, segments, count)
    return total / lengths.clamp(min=1).to(total.dtype)


def segment_spread(values: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """One value a sequence given to each of its trained tokens: `values` `[n]` by segment id, result `[rows, seq]`, 0
    outside the mask. Raises ValueError where a trained token's segment has no value."""
    segments = row_segments(mask, segments)
    if values.dim() != 1:
        raise ValueError(f"values must be one a sequence, [n], not {tuple(values.shape)}")
    if bool((mask & (segments >= values.shape[0])).any()):
        raise ValueError(f"segments name sequence {int(segments.max())}, but there are {values.shape[0]} values")
    if not values.numel():
        return as_float(values).sum().expand(mask.shape)  # 0, with a gradient
    return keep(values[segments.clamp(min=0, max=values.shape[0] - 1)], mask)


def segment_last(mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """Bool `[rows, seq]`: the last trained token of each sequence (none for a sequence without any)."""
    segments = row_segments(mask, segments)
    count = count_segments(segments)
    if not count:
        return torch.zeros_like(mask)
    place = torch.arange(mask.numel(), device=mask.device)
    index = segments.clamp(min=0).reshape(-1)
    trained = torch.where(mask.reshape(-1), place, -1)
    last = torch.full((count,), -1, dtype=torch.int64, device=mask.device).scatter_reduce(0, index, trained, "amax")
    return mask & (last[index] == place).reshape(mask.shape)


def shift_to_tokens(x: Tensor, segments: Tensor | None = None) -> Tensor:
    """Moves what the model says at position t to the token it speaks of: `result[t] = x[t - 1]`, 0 at a sequence's
    first token.

    `x` `[rows, seq, ...]` by position (logits, entropies or values of the distribution over the *next* token); the
    result is aligned with the tokens. It is the only shift there is: labels are never shifted as well.
    """
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    if segments is None:
        return shifted
    if segments.shape != x.shape[:2]:
        raise ValueError(f"shapes differ: x {tuple(x.shape)}, segments {tuple(segments.shape)}")
    inside = torch.zeros_like(segments, dtype=torch.bool)
    inside[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    inside = inside.reshape(inside.shape + (1,) * (x.dim() - 2)).expand(x.shape)
    return torch.where(inside, shifted, torch.zeros((), dtype=x.dtype, device=x.device))


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """`(x - mean) / sqrt(var + epsilon)` over the trained entries, 0 outside the mask; the mean is put back if not
    `shift_mean`. Any shape.

    With `group`, mean and variance are those of all its ranks together, each entry counted once: pass the
    data-parallel ranks that hold different samples (also ranks that hold none), never tensor- or context-parallel ranks
    that repeat them; None means this process alone. Constant input gives exactly 0 (or the constant, if not
    `shift_mean`). Raises ValueError where the shapes differ or the mask is not bool.
    """
    kept = keep(x, mask)

    def total(values: Tensor, largest: bool = False) -> Tensor:
        if group is not None:
            kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(values, op=kind, group=group)
        return values

    low = kept.new_full((), -torch.inf)
    seen = kept.detach()
    count, summed = total(torch.stack([mask.sum().to(kept.dtype), seen.sum()])).unbind()
    if count == 0:
        return kept
    extremes = (
        torch.stack([torch.where(mask, seen, low).max(), torch.where(mask, -seen, low).max()])
        if kept.numel()
        else low.repeat(2)
    )
    high, minus_low = total(extremes, largest=True).unbind()
    mean = summed / count
    squares = total(masked_sum((seen - mean).square(), mask))
    if high == -minus_low:
        return keep(torch.zeros_like(kept) if shift_mean else kept, mask)
    scale = torch.rsqrt(squares / (count - int(unbiased)).clamp(min=1) + epsilon)
    return keep((kept - mean) * scale + (0 if shift_mean else mean), mask)
