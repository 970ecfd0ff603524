"""Trajectories of any length to rows of one length: a pure function, with the loss's normaliser in the weights.

Worked example, `row_len=8`, token normalisation, prompts in brackets::

    a = [5 6] 7 8      advantage +1          tokens     5 6 7 8 9 4 4 0
    b = [9] 4 4        advantage -1          positions  0 1 2 3 0 1 2 0
                                             segments   0 0 0 0 1 1 1 -1
                                             mask       . . x x . x x .
                                             weights    4 trained tokens: 1/4 each
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from milkweed.errors import DataError
from milkweed.types import Batch, Trajectory

if TYPE_CHECKING:
    import torch

Normalise = Literal["token", "sequence"] | tuple[Literal["constant"], float]


def packable(trajectory: Trajectory, row_len: int | None = None) -> str | None:
    """None if `pack` takes it, else the reason why it is left out: it was dropped, nothing of it was sampled, or it
    is longer than `row_len`. Whether it was scored only matters with a reward, see `pack`."""
    if trajectory.dropped is not None:
        return trajectory.dropped
    if not any(trajectory.loss_mask[1:]):
        return "no trained token"
    if row_len is not None and len(trajectory.token_ids) > row_len:
        return f"{len(trajectory.token_ids)} tokens, more than a row of {row_len}"
    return None


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | Sequence[float]] | None = None,
    *,
    row_len: int = 0,
    normalise: Normalise = "token",
    groups: Sequence[Hashable] | None = None,
    sequences: Sequence[Hashable] | None = None,
    extra: Mapping[str, Sequence[Sequence[float] | np.ndarray | torch.Tensor]] | None = None,
    together: Sequence[Hashable] | None = None,
    too_long: Literal["error", "drop"] = "error",
    multiple: int | None = None,
    temperature: float | None = None,
) -> Batch:
    """Pack into rows of `row_len` tokens by best fit, longest first; no trajectory is cut. `row_len` 0 takes the
    longest trajectory's length, rounded up to a multiple of 64.

    Everything given per trajectory (`advantages`, `groups`, `sequences`, `together`, the lists in `extra`) is in the
    order of `trajectories`. `advantages`: one number each, or one a token (as long as its `token_ids`); with them, a
    trajectory without reward is left out, like one that was dropped or has no trained token. Without (supervised
    data) they are 0. `segments` number what is left, in the order given.

    Weights of trained tokens, with S sequences, T trained tokens in all and T_s in sequence s:
    "token": 1/T. "sequence": 1/(S T_s), the mean over sequences of their token means. ("constant", c): 1/(S c), the
    mean over sequences of token sums over a constant (Dr. GRPO, arXiv 2503.20783: c is the longest completion).
    Segments with the same name in `sequences` (default: `id`, each its own where that is empty) are one sequence.

    `extra`: a value for every token of `token_ids`, by name. Lists become float32; arrays and tensors keep their kind
    (float32, int64 or bool), may be `[tokens, k]` and then become `[rows, seq, k]`. Padding is 0.

    Trajectories with the same name in `together` share a row, side by side; where one of them is left out, all are
    (`pack_pairs` makes pairs of preferences so).

    `groups` (default `group_id`) only counts `totals["groups"]`. `multiple` trims the rows to the longest, rounded up
    to that multiple. `temperature` defaults to that of the trajectories' sampling.

    Raises DataError: naming the sample that is longer than a row (`too_long="drop"` leaves it out), lists of a
    different length, an advantage that is not finite, different temperatures, nothing left to train on.
    """
    import torch

    n = len(trajectories)
    lists = {"advantages": advantages, "groups": groups, "sequences": sequences, "together": together, **(extra or {})}
    for name, given in lists.items():
        if given is not None and len(given) != n:
            raise DataError(f"pack: {n} trajectories, {len(given)} {name}")
    if row_len < 0:
        raise DataError(f"pack: row_len must be at least 1 (or 0: chosen to fit), not {row_len}")
    if row_len == 0:
        sizes: dict[Hashable, int] = {}
        for i, t in enumerate(trajectories):
            unit = i if together is None else together[i]
            sizes[unit] = sizes.get(unit, 0) + (0 if packable(t) else len(t.token_ids))
        row_len = max(64, -(-max(sizes.values(), default=0) // 64) * 64)
    kept = _keep(trajectories, row_len, too_long, advantages is not None)
    if together is not None:
        kept = _keep_units(trajectories, kept, together, row_len, too_long)
    if not kept:
        why = sorted({packable(t, row_len) or "not scored" for t in trajectories})
        raise DataError(f"pack: none of {n} trajectories can be trained on ({'; '.join(why[:4]) or 'none given'})")

    chosen = [trajectories[i] for i in kept]
    lengths = np.fromiter((len(t.token_ids) for t in chosen), np.int64, len(chosen))
    row_of, start_of, rows = _best_fit(lengths, row_len, None if together is None else [together[i] for i in kept])
    width = row_len
    if multiple is not None:
        longest = int((start_of + lengths).max())
        width = min(row_len, math.ceil(longest / multiple) * multiple)

    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(total) - np.repeat(starts, lengths)
    segments = np.repeat(np.arange(len(chosen)), lengths)
    place = np.repeat(row_of * width + start_of, lengths) + positions

    mask = _flat((t.loss_mask for t in chosen), total, np.bool_)
    mask[starts] = False  # nothing precedes a first token, so it has no log-prob
    trained = np.bincount(segments[mask], minlength=len(chosen))
    names = [sequences[i] if sequences is not None else trajectories[i].id or ("", i) for i in kept]
    weights, count = _weights(trained, names, normalise)
    if groups is not None:
        group_names = {groups[i] for i in kept}
    else:
        group_names = {trajectories[i].group_id or ("", names[j]) for j, i in enumerate(kept)}

    def spread(values: np.ndarray, dtype: Any, fill: float = 0) -> torch.Tensor:
        out = np.full((rows * width, *values.shape[1:]), fill, dtype)
        out[place] = values
        return torch.from_numpy(out.reshape(rows, width, *values.shape[1:]))

    tensors = {}
    for name, values in (extra or {}).items():
        flat = _extra(name, [values[i] for i in kept], chosen, total)
        tensors[name] = spread(flat, flat.dtype)
    return Batch(
        tokens=spread(_flat((t.token_ids for t in chosen), total, np.int64), np.int64),
        positions=spread(positions, np.int64),
        segments=spread(segments, np.int64, -1),
        mask=spread(mask, np.bool_),
        weights=spread(weights[segments] * mask, np.float32),
        logprobs=spread(_flat((t.logprobs for t in chosen), total, np.float32) * mask, np.float32),
        advantages=spread(_advantages(advantages, kept, chosen, lengths, total) * mask, np.float32),
        extra=tensors,
        totals={"tokens": float(trained.sum()), "sequences": float(count), "groups": float(len(group_names))},
        temperature=_temperature(chosen) if temperature is None else temperature,
    )


def pack_pairs(
    pairs: Sequence[tuple[Trajectory, Trajectory]],
    *,
    margins: Sequence[float] | None = None,
    row_len: int = 0,
    too_long: Literal["error", "drop"] = "error",
    multiple: int | None = None,
    temperature: float | None = None,
) -> Batch:
    """Pack preferences, `(chosen, rejected)` each, for the losses over pairs (`dpo_loss`, `reward_model_loss`, ...): both
    of a pair in one row, `extra["pair"]` int64 (the pair's number in the order given, -1 on padding) and
    `extra["chosen"]` bool on each of their tokens, `totals["pairs"]`.

    `margins`: how clear each preference is, one number a pair, as `extra["margin"]`. A pair of which one side is
    dropped, has no trained token or is too long is left out whole. Other arguments and what is raised: as `pack`.
    """
    both = [t for pair in pairs for t in pair]
    number = [i for i in range(len(pairs)) for _ in range(2)]
    extra: dict[str, list[np.ndarray]] = {
        "pair": [np.full(len(t.token_ids), i + 1) for i, t in zip(number, both)],  # 0 is padding: see below
        "chosen": [np.full(len(t.token_ids), i % 2 == 0) for i, t in enumerate(both)],
    }
    if margins is not None:
        if len(margins) != len(pairs):
            raise DataError(f"pack_pairs: {len(pairs)} pairs, {len(margins)} margins")
        extra["margin"] = [np.full(len(t.token_ids), float(margins[i])) for i, t in zip(number, both)]
    batch = pack(
        both,
        row_len=row_len,
        sequences=[f"{i}/{side}" for i in range(len(pairs)) for side in ("chosen", "rejected")],
        groups=number,
        extra=extra,
        together=number,
        too_long=too_long,
        multiple=multiple,
        temperature=temperature,
    )
    batch.extra["pair"] -= 1
    batch.totals["pairs"] = batch.totals["groups"]
    return batch


def _keep(trajectories: Sequence[Trajectory], row_len: int, too_long: str, scored: bool) -> list[int]:
    kept = []
    for i, t in enumerate(trajectories):
        if packable(t) is not None or (scored and t.reward is None):
            continue
        if len(t.token_ids) > row_len:
            if too_long == "drop":
                continue
            raise DataError(
                f"sample {t.id or i!r} has {len(t.token_ids)} tokens, more than a row of {row_len}: "
                "raise row_len, sample fewer tokens, or pass too_long='drop'"
            )
        kept.append(i)
    return kept


def _keep_units(
    trajectories: Sequence[Trajectory], kept: list[int], together: Sequence[Hashable], row_len: int, too_long: str
) -> list[int]:
    """`kept` without the units of which a part was left out or which are longer than a row."""
    here, sizes = set(kept), dict.fromkeys(together, 0)
    for i, t in enumerate(trajectories):
        sizes[together[i]] += len(t.token_ids)
    part = {together[i] for i in range(len(trajectories)) if i not in here}
    out = []
    for i in kept:
        if together[i] in part:
            continue
        if sizes[together[i]] > row_len:
            if too_long == "drop":
                continue
            raise DataError(
                f"sample {trajectories[i].id or i!r} and those that must share its row have {sizes[together[i]]} tokens, "
                f"more than a row of {row_len}: raise row_len, or pass too_long='drop'"
            )
        out.append(i)
    return out


def _best_fit(
    lengths: np.ndarray, row_len: int, units: Sequence[Hashable] | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Row and first column of each sequence, and the number of rows: each goes, longest first, to the fullest row
    that still has room for it. Sequences of one unit are placed as one, side by side."""
    if units is not None:
        numbers: dict[Hashable, int] = {}
        of = np.fromiter((numbers.setdefault(u, len(numbers)) for u in units), np.int64, len(lengths))
        row, start, rows = _best_fit(np.bincount(of, weights=lengths).astype(np.int64), row_len)
        start_of = start[of]
        taken = np.zeros(len(numbers), np.int64)
        for i, unit in enumerate(of):
            start_of[i] += taken[unit]
            taken[unit] += lengths[i]
        return row[of], start_of, rows
    row_of, start_of = np.zeros_like(lengths), np.zeros_like(lengths)
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    rows = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect_left(room, (length, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row, rows = row_len, rows, rows + 1
        row_of[i], start_of[i] = row, row_len - free
        if free > length:
            insort(room, (free - length, row))
    return row_of, start_of, rows


def _weights(trained: np.ndarray, names: Sequence[Hashable], normalise: Normalise) -> tuple[np.ndarray, int]:
    """Weight of each segment's trained tokens, and the number of sequences."""
    numbers: dict[Hashable, int] = {}
    of = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64, len(names))
    count = len(numbers)
    if normalise == "token":
        return np.full(len(names), 1.0 / trained.sum()), count
    if normalise == "sequence":
        return 1.0 / (count * np.bincount(of, weights=trained)[of]), count
    if isinstance(normalise, tuple) and len(normalise) == 2 and normalise[0] == "constant" and normalise[1] > 0:
        return np.full(len(names), 1.0 / (count * normalise[1])), count
    raise DataError(f"pack: normalise={normalise!r} is none of 'token', 'sequence', ('constant', c > 0)")


def _advantages(
    advantages: Sequence[float | Sequence[float]] | None,
    kept: Sequence[int],
    chosen: Sequence[Trajectory],
    lengths: np.ndarray,
    total: int,
) -> np.ndarray:
    if advantages is None:
        return np.zeros(total)
    given = [advantages[i] for i in kept]
    scalar = [isinstance(a, (int, float)) or getattr(a, "ndim", None) == 0 for a in given]
    if all(scalar):
        flat = np.repeat(np.fromiter(map(float, given), np.float64, len(given)), lengths)  # type: ignore[arg-type]
    elif any(scalar):
        raise DataError("pack: advantages are numbers for some trajectories and lists for others")
    else:
        flat = _aligned("advantages", given, chosen, total)  # type: ignore[arg-type]
    if not np.isfinite(flat).all():
        at = int(np.repeat(np.arange(len(kept)), lengths)[~np.isfinite(flat)][0])
        raise DataError(f"pack: the advantage of sample {chosen[at].id or kept[at]!r} is not finite")
    return flat


def _aligned(
    name: str, lists: Sequence[Sequence[float]], chosen: Sequence[Trajectory], total: int
) -> np.ndarray:
    for t, values in zip(chosen, lists, strict=True):
        if len(values) != len(t.token_ids):
            raise DataError(f"pack: sample {t.id or '?'} has {len(t.token_ids)} tokens and {len(values)} {name}")
    return _flat(lists, total, np.float64)


def _extra(name: str, lists: Sequence[Any], chosen: Sequence[Trajectory], total: int) -> np.ndarray:
    """One tensor of `extra` for all tokens in turn, `[total, ...]`: see `pack` for its kind."""
    if not hasattr(lists[0], "dtype"):
        return _aligned(name, lists, chosen, total).astype(np.float32)
    arrays = [np.asarray(values) for values in lists]
    for t, values in zip(chosen, arrays, strict=True):
        if values.ndim not in (1, 2) or len(values) != len(t.token_ids) or values.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"pack: sample {t.id or '?'} has {len(t.token_ids)} tokens and {name} of shape {list(values.shape)}; "
                f"[tokens] or [tokens, k] is wanted, k the same for all"
            )
    kind = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}.get(arrays[0].dtype.kind)
    if kind is None:
        raise DataError(f"pack: {name} is of {arrays[0].dtype}; numbers or bools are wanted")
    return np.concatenate(arrays).astype(kind)


def _flat(lists: Iterable[Sequence[float]], total: int, dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype, total)


def _temperature(chosen: Sequence[Trajectory]) -> float:
    """Greedy tokens (temperature 0) carry log-probs at temperature 1."""
    found = {t.sampling.temperature or 1.0 for t in chosen}
    if len(found) > 1:
        raise DataError(
            f"pack: trajectories sampled at temperatures {sorted(found)} cannot share a batch, whose log-probs are "
            "taken at one; pass temperature= to choose it"
        )
    return found.pop()
