"""How a batch is cut: which rows a rank takes, in which micro-batches, padded and trimmed to what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from milkweed.errors import DataError
from milkweed.types import Batch

_PADDING = {"segments": -1, "pair": -1}


def rows_of(rank: int, ranks: int, rows: int) -> list[int]:
    """The rows that data-parallel rank `rank` of `ranks` takes: every `ranks`-th, so that part-filled last rows and
    sorted batches spread evenly."""
    return list(range(rank, rows, ranks))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """`batch` with empty rows (nothing but padding) appended until it has `rows`."""
    missing = rows - batch.rows
    if missing <= 0:
        return batch

    def grow(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_full((missing, *x.shape[1:]), _PADDING.get(name, 0))])

    return map_tensors(batch, grow)


def fit_columns(batch: Batch, multiple: int) -> Batch:
    """`batch` without the columns that are padding in every row, its length then rounded up to `multiple`."""
    used = (batch.segments >= 0).any(dim=0).nonzero()
    length = max(1, int(used[-1]) + 1 if used.numel() else 1)
    length = math.ceil(length / multiple) * multiple

    def fit(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] >= length:
            return x[:, :length].contiguous()
        tail = x.new_full((x.shape[0], length - x.shape[1], *x.shape[2:]), _PADDING.get(name, 0))
        return torch.cat([x, tail], dim=1)

    return map_tensors(batch, fit)


def micro_batches(
    batch: Batch, *, rank: int, ranks: int, micro_rows: int, multiple: int, row_multiple: int = 1
) -> Iterator[tuple[list[int], Batch]]:
    """This rank's micro-batches, each with the indices of its real rows. Every rank gets equally many, of equally many
    rows, some of them empty; lengths are a multiple of `multiple`, numbers of rows one of `row_multiple`."""
    mine = rows_of(rank, ranks, batch.rows)
    each = math.ceil(batch.rows / ranks)
    for start in range(0, each, micro_rows):
        index = mine[start : start + micro_rows]
        size = math.ceil(min(micro_rows, each - start) / row_multiple) * row_multiple
        yield index, fit_columns(pad_rows(batch.select(index), size), multiple)


def check(batch: Batch, *, seq_len: int, vocab: int) -> None:
    """Refuse a batch that cannot be what was meant. Raises DataError naming the tensor and the row."""
    shape = tuple(batch.tokens.shape)
    if len(shape) != 2:
        raise DataError(f"batch.tokens must be [rows, seq], not {list(shape)}")
    for name, x in batch.tensors().items():
        if tuple(x.shape[:2]) != shape:
            raise DataError(f"batch.{name} has shape {list(x.shape)}, but batch.tokens has {list(shape)}")
    if batch.rows == 0:
        raise DataError("batch has no rows")
    longest = (batch.segments >= 0).any(dim=0).nonzero()
    used = int(longest[-1]) + 1 if longest.numel() else 0
    if used > seq_len:
        row = int((batch.segments[:, seq_len:] >= 0).any(dim=1).nonzero()[0])
        raise DataError(f"batch row {row} holds {used} tokens, more than trainer.seq_len = {seq_len}")
    low, high = int(batch.tokens.min()), int(batch.tokens.max())
    if low < 0 or high >= vocab:
        row = int(((batch.tokens < 0) | (batch.tokens >= vocab)).any(dim=1).nonzero()[0])
        raise DataError(f"batch row {row} holds token id {high if high >= vocab else low}; the model has ids 0 to {vocab - 1}")
    trained_first = batch.mask & ((batch.positions == 0) | (batch.segments < 0))
    if bool(trained_first.any()):
        row, column = trained_first.nonzero()[0].tolist()
        raise DataError(f"batch.mask is set at row {row}, token {column}: a sequence's first token or padding has no log-prob")


def in_batch(values: torch.Tensor, rows: list[int], batch: Batch) -> torch.Tensor:
    """A micro-batch's `values` `[rows and more, its own length, ...]` as rows of the whole batch, on the CPU."""
    values = values[: len(rows), : batch.tokens.shape[1]].cpu()
    out = values.new_zeros(len(rows), batch.tokens.shape[1], *values.shape[2:])
    out[:, : values.shape[1]] = values
    return out


def merge_rows(parts: Sequence[tuple[list[int], torch.Tensor] | None], rows: int, seq: int) -> torch.Tensor:
    """Put ranks' rows `(indices, [n, seq, ...])` back in the order of the batch; `[rows, seq, ...]`."""
    given = [part for part in parts if part is not None]
    like = given[0][1] if given else torch.zeros(0, seq)
    out = like.new_zeros(rows, seq, *like.shape[2:])
    for index, values in given:
        out[index] = values
    return out


def map_tensors(batch: Batch, fn: Callable[[str, torch.Tensor], torch.Tensor]) -> Batch:
    """`batch` with `fn(name, tensor)` in place of every tensor."""
    own = {n: fn(n, getattr(batch, n)) for n in batch.tensors() if n not in batch.extra}
    return Batch(
        **own,
        extra={k: fn(k, v) for k, v in batch.extra.items()},
        totals=batch.totals,
        temperature=batch.temperature,
    )
