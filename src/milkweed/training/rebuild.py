"""A trainer whose ranks died comes back: new ranks, the last checkpoint, and the steps since trained again.

The controller keeps what the ranks were told since that checkpoint: each step's batch and packed loss, in its own memory,
until the next checkpoint. Training the same batches again gives the same weights, and that is checked: a step whose loss
or norm of the gradient differs ends the rebuilding, since its version would name two sets of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from milkweed.errors import FleetError, MilkweedError
from milkweed.fleet.supervision import Budget, Event, kind_of
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.fleet import Replica

Ask = Callable[..., Awaitable[list[Any]]]
SAME = ("loss", "grad_norm", "tokens")


class History:
    """What makes new ranks the ranks that died."""

    def __init__(self, name: str, spawn: Callable[[], Awaitable[Replica]], start: tuple[Any, ...], budget: Budget = Budget()) -> None:
        self.name, self._spawn, self._start, self._budget = name, spawn, start, budget
        self._origin: tuple[int | None, int | None] | None = None
        self._told: list[tuple[str, tuple[Any, ...], dict[str, Any] | None]] = []
        self._adopted: tuple[Any, ...] | None = None
        self._saving: PolicyVersion | None = None
        self._failures = 0
        self.note: Callable[[Event], None] = lambda event: None

    def heard(self, endpoint: str, args: tuple[Any, ...], answers: list[Any], version: PolicyVersion) -> None:
        """The ranks have done this; what it changes in them is kept."""
        if endpoint == "update":
            self._failures = 0
            if answers[0]["metrics"].get("applied", 1.0):
                self._told.append((endpoint, args, answers[0]["metrics"]))
        elif endpoint == "set_lr":
            self._told.append((endpoint, args, None))
        elif endpoint == "save":  # whole only once `saved` says so; until then it is written again too
            self._told.append((endpoint, args, None))
            self._saving = version
        elif endpoint == "saved" and all(answers) and self._saving is not None:
            last = max((i for i, (told, *_) in enumerate(self._told) if told == "save"), default=-1)
            self._origin, self._told = (self._saving.incarnation, self._saving.step), self._told[last + 1 :]
            self._saving = None
        elif endpoint == "adopt":
            self._adopted = args
        elif endpoint == "load":
            loaded: PolicyVersion = answers[0]["version"]
            self._origin, self._told = (loaded.incarnation, loaded.step if answers[0]["state"] is not None else None), []
            self._saving = None

    @property
    def steps(self) -> int:
        """Steps that would have to be trained again."""
        return sum(endpoint == "update" for endpoint, *_ in self._told)

    async def rebuild(self, error: FleetError, dead: Replica, ask: Callable[[Replica], Ask]) -> Replica:
        """New ranks in the state of those of `dead`, which `error` ended. Raises FleetError where they fail too often, or
        come out differently."""
        clock = asyncio.get_running_loop().time
        began, first = clock(), error
        while True:
            self._failures += 1
            self.note(Event(self.name, "failed", kind_of(error), str(error), clock() - began))
            await dead.stop()
            if self._failures > self._budget.retries:
                cause = f"it failed {self._failures} times without a step in between, the last: {error.cause}"
                self.note(Event(self.name, "given up", kind_of(error), cause))
                raise FleetError(self.name, kind_of(error), cause) from error
            await asyncio.sleep(self._budget.rest_s(self._failures))
            try:
                dead = await self._spawn()
                await self._restore(ask(dead))
            except FleetError as again:
                error = again
                continue
            except MilkweedError as refusal:
                await dead.stop()
                raise FleetError(self.name, "refused", f"it failed ({first.cause}) and could not be rebuilt: {refusal}") from refusal
            self.note(Event(self.name, "replaced", kind_of(first), f"{self.steps} steps trained again", clock() - began))
            return dead

    async def _restore(self, ask: Ask) -> None:
        await ask("start", *self._start)
        if self._origin is not None:
            incarnation, step = self._origin
            answer = (await ask("load", incarnation, step))[0]
            if step is not None and answer["version"] != PolicyVersion(incarnation or 0, step):
                raise MilkweedError(f"checkpoint {step} came back as version {answer['version']}")
        for endpoint, args, before in self._told:
            answers = await ask(endpoint, *args)
            if before is not None:
                now = answers[0]["metrics"]
                if different := [k for k in SAME if now.get(k) != before.get(k)]:
                    key = different[0]
                    raise MilkweedError(f"step {answers[0]['version'].step} trained again gave {key} {now.get(key)!r}, not {before.get(key)!r}; resume the run from its checkpoint")
        if self._adopted is not None:
            await ask("adopt", *self._adopted)
