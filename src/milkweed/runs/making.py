"""What the loop that makes groups ahead keeps to, works on, and needs of the parts around it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from milkweed.data.ledger.records import Issue
from milkweed.types import Group, PolicyVersion, Prompt, Trajectory


class Records(Protocol):
    """What the loop needs of a ledger."""

    def issue(self, issues: Sequence[Issue]) -> None: ...
    def finish(self, number: int, trajectory: Trajectory, seconds: float = 0.0) -> None: ...
    def fail(self, number: int, sample: int, attempt: int, reason: str) -> None: ...
    def drop(self, number: int, samples: Sequence[int], reason: str, detail: str = "") -> None: ...
    def train(self, version: PolicyVersion, samples: Sequence[tuple[int, int, int, int]], *, again: bool = False) -> None: ...
    async def room(self) -> None: ...


class Stream(Protocol):
    """What the loop needs of a prompt stream."""

    epoch: int
    seed: int

    @property
    def taken(self) -> int: ...
    def take(self, n: int) -> list[Prompt]: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop keeps to.

    `late` is what happens to a group that younger ones overtook until its first tokens are over the bound: "mask" trains
    its other tokens only and never waits; "wait" lets the batch wait for it before that. `oversample` issues so much
    more (0.5: half as much again) and gives the tail up when a batch is full. `retries` are further attempts at a
    sample that failed. Nothing is issued for steps after `steps`. A filter that rejects `patience` batches in a row ends
    the run.
    """

    groups: int
    samples: int
    staleness: int = 0
    steps: int = 1 << 62
    late: Literal["mask", "wait"] = "mask"
    oversample: float = 0.0
    retries: int = 1
    patience: int = 20
    stalled_s: float = 1800.0

    def __post_init__(self) -> None:
        for key, least in (("groups", 1), ("samples", 1), ("staleness", 0), ("oversample", 0), ("retries", 0), ("patience", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, not {getattr(self, key)}")

    @property
    def cohort(self) -> int:
        """Groups issued for one batch."""
        return math.ceil(self.groups * (1 + self.oversample))


Make = Callable[[Prompt, Issue, int, int], Awaitable[Trajectory]]
"""`make(prompt, issue, sample, attempt)` samples and scores one trajectory; it comes back dropped where that failed.
FleetError ends the loop."""


@dataclass(eq=False)
class Made:
    """A group on its way."""

    issue: Issue
    prompt: Prompt
    begun: PolicyVersion
    """What the engines served when it was issued: no token of it is older."""
    due: int
    """The trainer's step that it was issued for."""
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.issue.number

    def group(self) -> Group:
        return Group(id=self.issue.group, prompt=self.prompt, trajectories=[t for _, t in sorted(self.trajectories.items())])


def live(made: Made) -> list[int]:
    """The finished samples of it that are not dropped."""
    return sorted(i for i, t in made.trajectories.items() if t.dropped is None)
