"""Keeps the replicas of a role there: one that failed is replaced, unless its fault repeats.

    starting --> serving --> failed --> (back-off) --> starting
                                |
                                +--> given up: the same place failed `retries` times in a row

A place is the role and index of a replica; the replicas that fill it one after another are never used twice. One with no
host to be on waits for one, and says so: that is no failure of its own. A replica that served for `settled_s` has earned its
place a fresh budget. A role has a budget as well, for faults that go round its places, and so has a host, which is used no
more where others are. What is called a failure, and whose, is said in `kind_of` and `recycles`, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from milkweed.config import FaultsConfig
from milkweed.errors import ConfigError, DataError, FleetError, MilkweedError, RemoteError, TransferError

State = Literal["starting", "serving", "failed", "waiting", "given up"]
WAIT_S = 2.0
"""Between two looks for a host."""


def kind_of(error: BaseException) -> str:
    """died, hung, raised, refused, lost, wrong, slow (as FleetError says), `transfer` or `config`."""
    if isinstance(error, FleetError):
        return error.kind
    if isinstance(error, TransferError):
        return "transfer"
    return "config" if isinstance(error, (ConfigError, DataError)) else "raised"


def recycles(error: BaseException) -> bool:
    """Whether the replica is done for. Code of a user's that raised inside it leaves it well: that is reported only."""
    return isinstance(error, FleetError) and not isinstance(error, RemoteError)


class Failures:
    """How often what failed lately. The supervisors of a mesh share one."""

    def __init__(self) -> None:
        self._when: dict[str, deque[float]] = {}

    def count(self, what: str, now: float, window_s: float) -> int:
        """One more failure of `what`; how many there have been within `window_s`."""
        when = self._when.setdefault(what, deque())
        when.append(now)
        while now - when[0] > window_s:
            when.popleft()
        return len(when)


class Event(msgspec.Struct, omit_defaults=True):
    """One line of a run's faults.jsonl. `after_s` is the time from the failure on."""

    replica: str
    what: Literal["failed", "waiting", "replaced", "given up", "scaled"]
    kind: str = ""
    cause: str = ""
    after_s: float = 0.0


@dataclass
class Place:
    """One replica's place."""

    index: int
    state: State = "serving"
    since: float = 0.0
    failures: int = 0
    """In a row."""
    error: BaseException | None = None
    work: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """Of one role. `bring(index)` starts a replica and makes it serve; it raises where that fails, with nothing left.

    `ended` hears, once, the error that ends the run; `note` every event; `shun` the name of a host whose budget is spent.
    Everything runs on one event loop, whose clock is the only one.
    """

    def __init__(
        self,
        role: str,
        bring: Callable[[int], Awaitable[object]],
        *,
        ended: Callable[[FleetError], None],
        note: Callable[[Event], None] = lambda event: None,
        budget: FaultsConfig = FaultsConfig(),
        failures: Failures | None = None,
        shun: Callable[[str], None] = lambda host: None,
    ) -> None:
        self.role, self.budget, self.places = role, budget, dict[int, Place]()
        self._bring, self._ended, self._note = bring, ended, note
        self._over = False
        self._failures, self._shun = failures or Failures(), shun

    def serving(self, index: int) -> None:
        """A replica that somebody else has started serves in this place."""
        self.places[index] = Place(index, since=self._now())

    def failed(self, index: int, error: FleetError, host: str = "") -> None:
        """The replica in this place, on `host`, is gone; another is started. Told twice of one failure, it hears it once."""
        place = self.places.get(index)
        if self._over or place is None or place.state != "serving":
            return
        if self._now() - place.since > self.budget.settled_s:
            place.failures = 0
        if host and kind_of(error) != "lost" and self._failures.count(host, self._now(), self.budget.window_s) > self.budget.host_retries:
            self._shun(host)
        place.state = "failed"
        place.work = asyncio.ensure_future(self._replace(place, error))

    async def add(self, index: int) -> None:
        """One more place, filled when this returns. Raises what ended the attempts."""
        self.places[index] = place = Place(index, state="starting", since=self._now())
        place.work = asyncio.ensure_future(self._replace(place, None))
        await place.work
        if place.error is not None:
            del self.places[index]
            raise place.error

    async def drop(self, index: int) -> None:
        """One place less; whoever fills it is the caller's to end."""
        place = self.places.pop(index, None)
        if place is not None and place.work is not None and not place.work.done():
            place.work.cancel()
            await asyncio.wait([place.work])

    async def close(self) -> None:
        """Nothing is replaced any more."""
        self._over = True
        work = [p.work for p in self.places.values() if p.work is not None and not p.work.done()]
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work)

    async def _replace(self, place: Place, error: BaseException | None) -> None:
        name, began, first = f"{self.role}{place.index}", self._now(), error
        while not self._over:
            if error is not None and error is not first and kind_of(error) == "lost":
                if place.state != "waiting":
                    self._note(Event(name, "waiting", "lost", str(error), self._now() - began))
                place.state = "waiting"
                await asyncio.sleep(WAIT_S)
            elif error is not None:
                place.failures, place.state, place.error = place.failures + 1, "failed", error
                self._note(Event(name, "failed", kind_of(error), str(error), self._now() - began))
                role = self._failures.count(self.role, self._now(), self.budget.window_s) if kind_of(error) != "lost" else 0
                if place.failures > self.budget.retries or isinstance(error, (ConfigError, DataError)):
                    self._give_up(place, error, f"{place.failures} times in a row" if place.failures > 1 else "once, for good")
                    return
                if role > self.budget.role_retries + 2 * len(self.places):
                    self._give_up(place, error, f"as the last of {role} failures of role {self.role} in {self.budget.window_s:g} s")
                    return
                await asyncio.sleep(self.budget.rest_s(place.failures))
            waited, place.state = place.state == "waiting", "starting"
            try:
                await self._bring(place.index)
            except MilkweedError as again:
                error = again
                if waited and kind_of(error) == "lost":
                    place.state = "waiting"  # still, and said already
                continue
            place.state, place.since, place.error = "serving", self._now(), None
            self._note(Event(name, "replaced", kind_of(first) if first else "", after_s=self._now() - began))
            return

    def _give_up(self, place: Place, error: BaseException, times: str) -> None:
        place.state, self._over = "given up", True
        name = f"{self.role}{place.index}"
        self._note(Event(name, "given up", kind_of(error), str(error)))
        self._ended(FleetError(name, kind_of(error), f"it failed {times}, the last: {getattr(error, 'cause', error)}"))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
