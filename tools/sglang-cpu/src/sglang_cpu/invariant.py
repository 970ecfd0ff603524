"""Results of a row that depend on nothing but the row: products and attention for SGLang's deterministic mode.

A CPU's GEMM gives a row the same bits among any 16 rows or more, and other bits among fewer, so smaller products are
padded to 16 rows. Attention goes over the keys in blocks of `BLOCK` that begin at the sequence's start, whatever part of it is
new, cached or padding: every block is one product of fixed width, blocks are added in order, and what is masked adds an
exact zero. One thread, since threads cut vectorised loops at other places.
"""

from __future__ import annotations

import warnings

import torch

ROWS = 16
BLOCK = 128
_library: torch.library.Library | None = None


def enable() -> None:
    """From now on this process's matrix products give a row the same bits whatever other rows there are."""
    global _library
    if _library is None:
        torch.set_num_threads(1)
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced, which is meant
            _library.impl("mm", product, "CPU")
            _library.impl("addmm", product_plus, "CPU")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`."""
    rows = a.shape[0]
    if rows < ROWS:
        a = torch.cat([a, a.new_zeros(ROWS - rows, a.shape[1])])
    else:
        a = a.contiguous()
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.mm(a, b, out=out)  # with `out` it is another operator, which nobody has replaced
    return out[:rows]


def product_plus(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """`beta * bias + alpha * (a @ b)`."""
    out = product(a, b)
    return (out if alpha == 1 else out * alpha) + (bias if beta == 1 else bias * beta)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of each query over the first `seen` keys of its sequence.

    `queries` [batch, kv heads, rows, size], `keys` and `values` [batch, kv heads, length, size] with a length that is a
    multiple of BLOCK and finite padding, `seen` int [batch, rows]. Returns the shape of `queries`.
    """
    batch, heads, rows, size = queries.shape
    blocks = keys.shape[2] // BLOCK
    if rows < ROWS:
        queries = torch.cat([queries, queries.new_zeros(batch, heads, ROWS - rows, size)], dim=2)
        seen = torch.cat([seen, seen.new_ones(batch, ROWS - rows)], dim=1)
    wide = queries.shape[2]
    each = (batch * heads * blocks, wide, size)
    q = queries.unsqueeze(2).expand(batch, heads, blocks, wide, size).reshape(each)
    k = keys.reshape(batch * heads * blocks, BLOCK, size)
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, blocks, wide, BLOCK) * scale
    place = torch.arange(blocks * BLOCK).view(1, 1, blocks, 1, BLOCK)
    scores.masked_fill_(place >= seen[:, None, None, :, None], float("-inf"))
    top = scores.amax(dim=-1).amax(dim=2)
    weights = torch.exp(scores - top[:, :, None, :, None])
    sums = weights.sum(dim=-1)
    parts = torch.bmm(weights.view(-1, wide, BLOCK), values.reshape(-1, BLOCK, size)).view(batch, heads, blocks, wide, size)
    mixed, total = parts.new_zeros(batch, heads, wide, size), sums.new_zeros(batch, heads, wide)
    for block in range(blocks):
        mixed += parts[:, :, block]
        total += sums[:, :, block]
    return (mixed / total[..., None])[:, :, :rows]
