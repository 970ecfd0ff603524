"""Which sequences of different lengths to pad to one length and handle as one batch. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence


def cut(lengths: Sequence[int], *, saving: int, budget: int) -> list[list[int]]:
    """Partition rows so that padding each part to its longest row wastes little, in few parts.

    A part is split where that saves most padding, as long as it saves at least `saving` positions (what one more kernel
    call costs), and is then cut so that no part holds more than `budget` positions unless it is a single row.
    Returns row numbers, ascending in each part; parts from longest to shortest.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    parts: list[list[int]] = []
    pending = [(0, len(order))]
    while pending:
        low, high = pending.pop()
        if low == high:
            continue
        top, best, at = lengths[order[low]], saving - 1, 0
        if (top - lengths[order[high - 1]]) * (high - low - 1) > best:  # else no cut can save enough
            for n in range(low + 1, high):
                saved = (top - lengths[order[n]]) * (high - n)
                if saved > best:
                    best, at = saved, n
        if at:
            pending += [(at, high), (low, at)]
            continue
        rows = max(1, budget // max(top, 1))
        parts += [sorted(order[n : min(n + rows, high)]) for n in range(low, high, rows)]
    return parts
