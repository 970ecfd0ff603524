"""Attention that keeps the sequences packed in a row apart, for a CPU.

Two exact ways, the cheaper of which is taken per micro-batch: a dense mask over whole rows, `rows * seq^2`, or the
sequences gathered side by side and padded to the longest, `sequences * longest^2`. Rows of many short sequences make
the first do ten times the work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class DocumentMask:
    """Which tokens see which. Made once for a micro-batch and shared by all layers.

    `segments` `[rows, seq]` names each token's sequence (-1: padding). `queries` is the slice of a row that this rank
    holds where rows are cut over ranks (context parallel), else None. A plain object, so that the sharding wrappers
    pass it on untouched.
    """

    def __init__(self, segments: torch.Tensor, queries: slice | None = None) -> None:
        self.segments, self.queries = segments, queries
        self._dense: torch.Tensor | None = None
        self.gather: torch.Tensor | None = None
        if queries is None:
            self._plan()

    def _plan(self) -> None:
        """Where each sequence's tokens lie, if gathering them costs less than the dense mask."""
        rows, seq = self.segments.shape
        flat = self.segments.reshape(-1)
        real = (flat >= 0).nonzero().squeeze(1)
        if real.numel() == 0:
            return
        ids = flat[real]
        first = torch.ones_like(ids, dtype=torch.bool)
        first[1:] = (ids[1:] != ids[:-1]) | (real[1:] % seq == 0)
        starts = first.nonzero().squeeze(1)
        lengths = torch.diff(starts, append=torch.tensor([ids.numel()], device=ids.device))
        count, longest = starts.numel(), int(lengths.max())
        if count * longest * (longest + 32) > 0.6 * rows * seq * seq:
            return
        column = torch.arange(longest, device=flat.device)
        inside = column[None, :] < lengths[:, None]
        self.gather = real[(starts[:, None] + column[None, :]).clamp_(max=real.numel() - 1)].reshape(-1)
        slot = torch.arange(count * longest, device=flat.device).reshape(count, longest)
        back = torch.zeros(rows * seq, dtype=torch.long, device=flat.device)
        back[real] = slot[inside]
        self.back, self.count, self.longest = back, count, longest

    @property
    def dense(self) -> torch.Tensor:
        """bool `[rows, 1, queries, seq]`, True where a query may look."""
        if self._dense is None:
            s = self.segments
            at = torch.arange(s.shape[1], device=s.device)
            mask = (s[:, :, None] == s[:, None, :]) & (at[:, None] >= at[None, :])
            if self.queries is not None:
                mask = mask[:, self.queries]
            self._dense = mask[:, None]
        return self._dense


def document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: DocumentMask, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    """Causal attention within each sequence. q `[rows, seq, heads, dim]`, k and v alike (fewer heads with GQA)."""
    if mask.gather is None:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask.dense,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out.transpose(1, 2)

    def side_by_side(x: torch.Tensor) -> torch.Tensor:
        picked = x.reshape(-1, *x.shape[2:]).index_select(0, mask.gather)
        return picked.view(mask.count, mask.longest, *x.shape[2:]).transpose(1, 2)

    # what pads a short sequence comes after its own tokens, so causality alone hides it
    out = F.scaled_dot_product_attention(
        side_by_side(q), side_by_side(k), side_by_side(v), is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    flat = out.transpose(1, 2).reshape(mask.count * mask.longest, *out.shape[1:2], out.shape[3])
    return flat.index_select(0, mask.back).view(*q.shape[:2], *flat.shape[1:])
