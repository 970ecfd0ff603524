"""Sequences packed by hand in any order, with NaN in every place that a loss must not read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from milkweed.algorithms import loss_weights
from milkweed.types import Batch

NAN = float("nan")


@dataclass
class Sequence:
    """One sequence: per-token values as lists of one length; `constant` values are the same on each token."""

    mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    extra: dict[str, list[float]]
    constant: dict[str, int] = field(default_factory=dict)


def make_sequences(seed: int, count: int, longest: int = 6) -> list[Sequence]:
    """Random sequences; the first token is never trained, at least one token of the batch is."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        n = rng.randint(2, longest)
        mask = [False] + [rng.random() < 0.7 for _ in range(n - 1)]
        mask[-1] = mask[-1] or number < 2
        draw = lambda n=n: [rng.gauss(0, 1) for _ in range(n)]  # noqa: E731
        logprobs = [-abs(x) for x in draw()]
        extra = {
            "old_logprobs": [x + 0.3 * rng.gauss(0, 1) for x in logprobs],
            "reference_logprobs": [x + 0.5 * rng.gauss(0, 1) for x in logprobs],
            "teacher_logprobs": [x + 0.5 * rng.gauss(0, 1) for x in logprobs],
            "returns": draw(),
            "values": draw(),
        }
        pair = {"pair": number // 2, "chosen": number % 2, "desirable": number % 2}
        made.append(Sequence(mask, logprobs, [rng.gauss(0, 1)] * n, extra, pair))
    return made


@dataclass
class Packed:
    batch: Batch
    index: Tensor
    """int64 [rows, seq]: number of the token in order of the sequences; the last one stands for padding."""


def pack(sequences: list[Sequence], rows: list[list[int]], padding: int = 0, how: str = "token") -> Packed:
    """Rows of sequences, by number, in the order given; `padding` more columns, all padding NaN."""
    starts, total = [], 0
    for s in sequences:
        starts.append(total)
        total += len(s.mask)
    width = max((sum(len(sequences[i].mask) for i in row) for row in rows), default=0) + padding
    shape = (len(rows), max(width, 1))
    index = torch.full(shape, total, dtype=torch.int64)
    segments = torch.full(shape, -1, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    names = ["logprobs", "advantages", *sequences[0].extra]
    values = {n: torch.full(shape, NAN, dtype=torch.float64) for n in names}
    constants = {n: torch.full(shape, -1, dtype=torch.int64) for n in sequences[0].constant}
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            s, n = sequences[i], len(sequences[i].mask)
            place = (r, slice(at, at + n))
            index[place] = torch.arange(starts[i], starts[i] + n)
            segments[place] = i
            mask[place] = torch.tensor(s.mask)
            for name, given in {"logprobs": s.logprobs, "advantages": s.advantages, **s.extra}.items():
                values[name][place] = torch.tensor(given, dtype=torch.float64)
            for name, number in s.constant.items():
                constants[name][place] = number
            at += n
    for name, value in values.items():
        values[name] = torch.where(mask, value, NAN)  # also on tokens that are real but not trained
    batch = Batch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        positions=torch.zeros(shape, dtype=torch.int64),
        segments=segments,
        mask=mask,
        weights=loss_weights(mask, how, segments=segments, constant=7.0).to(torch.float64),
        logprobs=values.pop("logprobs"),
        advantages=values.pop("advantages"),
        extra=values | constants,
        totals={"tokens": int(mask.sum()), "sequences": len(sequences), "pairs": len(sequences) // 2},
    )
    return Packed(batch, index)


class Policy:
    """A policy whose log-probs (and head) are free parameters, one a token; NaN where nothing is trained."""

    def __init__(self, theta: Tensor, index: Tensor, mask: Tensor) -> None:
        self.logprobs = torch.where(mask, theta[index], torch.full_like(theta[index], NAN))
        self.values = theta[index]

    def entropy(self) -> Tensor:
        return self.logprobs.exp() * 2

    def logits(self) -> Tensor:
        raise AssertionError("not needed")


def loss_and_gradient(loss, packed: Packed, theta: Tensor, micro_batches: list[list[int]]) -> tuple[Tensor, Tensor]:
    """What the trainer does: each micro-batch's share, summed."""
    theta = theta.clone().requires_grad_()
    total = torch.zeros((), dtype=theta.dtype)
    for rows in micro_batches:
        part = packed.batch.select(rows)
        out = loss(part, Policy(theta, packed.index[rows], part.mask))
        out = out[0] if isinstance(out, tuple) else out
        share = out if out.dim() == 0 else (out * part.weights).sum()
        share.backward()
        total = total + share.detach()
    return total, theta.grad
