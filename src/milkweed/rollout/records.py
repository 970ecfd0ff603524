"""What the router keeps about each engine and each sample, and what it reports of an update."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from milkweed.errors import FleetError
from milkweed.rollout.answers import NOTHING, join, usable
from milkweed.rollout.protocol import Begun, CommitReport, EngineReply, EngineRequest, EngineStats
from milkweed.types import Completion, PolicyVersion


class EngineReplica(Protocol):
    """What the router needs of `fleet.Replica`."""

    name: str
    index: int
    host: Any

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any: ...
    async def stop(self) -> None: ...


class UpdateReport(msgspec.Struct):
    """What became of one version on each engine. `seconds` is the slowest commit, measured inside the engine."""

    version: PolicyVersion
    engines: dict[str, CommitReport]

    @property
    def seconds(self) -> float:
        return max((r.seconds for r in self.engines.values()), default=0.0)

    @property
    def failed(self) -> dict[str, str]:
        return {name: r.message for name, r in self.engines.items() if not r.ok}


class Pending:
    """One sample on its way. `engine` is where it was sent, None while it waits for room."""

    __slots__ = ("request", "future", "engine", "prefill", "lost", "blocks", "begun", "sent_at")

    def __init__(self, request: EngineRequest, future: asyncio.Future[EngineReply]) -> None:
        self.request, self.future = request, future
        self.engine: Engine | None = None
        self.prefill: Engine | None = None
        """Who prefills it, where `engine` only decodes."""
        self.blocks: tuple[PolicyVersion, list[int]] | None = None
        """What `affinity.blocks` makes of its prompt under a version."""
        self.lost: list[str] = []
        """The engines that failed under it."""
        self.begun: Begun | None = None
        """What is known of it so far."""
        self.sent_at = 0.0

    def elsewhere(self) -> None:
        """Its engine has it no more; the next one goes on from the tokens that are known."""
        self.engine = self.prefill = None
        begun = usable(self.begun, self.request.sampling)
        self.request = msgspec.structs.replace(self.request, begun=begun)
        self.begun = join(begun, NOTHING) if begun is not None else None  # its own, to grow


class Deadlines:
    """Calls `late` for each sample that is still here when its time is over. One timer for all that end within the same
    tenth of a second: thousands of timers are a good part of what a sample costs."""

    def __init__(self, late: Callable[[Pending], None]) -> None:
        self._late = late
        self._due: dict[int, tuple[set[Pending], asyncio.TimerHandle]] = {}

    def add(self, p: Pending, seconds: float) -> int:
        """Returns what `discard` wants."""
        loop = asyncio.get_running_loop()
        tick = math.ceil((loop.time() + seconds) * 10)
        if tick not in self._due:
            self._due[tick] = (set(), loop.call_at(tick / 10, self._over, tick))
        self._due[tick][0].add(p)
        return tick

    def discard(self, p: Pending, tick: int) -> None:
        if tick in self._due:
            waiting, timer = self._due[tick]
            waiting.discard(p)
            if not waiting:
                timer.cancel()
                del self._due[tick]

    def _over(self, tick: int) -> None:
        for p in self._due.pop(tick)[0]:
            self._late(p)


class Engine:
    """What the router knows of one engine."""

    def __init__(self, replica: EngineReplica, stats: EngineStats) -> None:
        self.replica, self.stats = replica, stats
        self.prefills = stats.port != 0
        """It only prefills, for others that decode."""
        self.pending: dict[str, Pending] = {}
        self.outbox: list[EngineRequest] = []
        self.aborts: list[str] = []
        self.dead: FleetError | None = None
        self.stale: str | None = None
        """Why it gets no samples although it lives: its last commit failed."""
        self.standby = False
        """It gets every version, and samples only once another has failed."""
        self.leaving = False
        """It finishes what it has and gets no more."""
        self.parting = False
        """What it has not finished it is giving back."""
        self.busy_at_start = 0.0
        self.paces: deque[float] = deque(maxlen=64)
        """Seconds a token of its latest samples, from when they were sent."""
        self.collector: asyncio.Task[None] | None = None

    def paced(self, p: Pending, tokens: int, now: float) -> None:
        """It has answered `p` with so many tokens, those of others included."""
        fresh = tokens - (len(p.request.begun.token_ids) if p.request.begun else 0)
        if fresh > 0:
            self.paces.append((now - p.sent_at) / fresh)

    @property
    def usable(self) -> bool:
        return self.dead is None and self.stale is None and not self.standby and not self.leaving


class ByLoad:
    """Which usable engine has the fewest samples in flight, without looking at all of them: a heap whose entries are
    checked when they come to the top. Tell it (`changed`) whenever an engine's load or fitness may have changed."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._heap: list[tuple[int, int]] = []
        self._place = {id(e): n for n, e in enumerate(self._engines)}
        self.rebuild()

    def rebuild(self) -> None:
        self._heap = [(len(e.pending), n) for n, e in enumerate(self._engines) if e.usable]
        heapq.heapify(self._heap)

    def changed(self, engine: Engine) -> None:
        if id(engine) not in self._place:
            return  # it has left
        heapq.heappush(self._heap, (len(engine.pending), self._place[id(engine)]))
        if len(self._heap) > 8 * len(self._engines) + 64:
            self.rebuild()

    def least(self) -> Engine | None:
        """None where no engine is usable."""
        while self._heap:
            load, n = self._heap[0]
            engine = self._engines[n]
            if engine.usable and len(engine.pending) == load:
                return engine
            heapq.heappop(self._heap)
        return None


def completion(request: EngineRequest, reply: EngineReply, engine: Engine) -> Completion:
    """What `engine` answered to a request to sample."""
    return Completion(
        prompt_ids=request.token_ids,
        token_ids=reply.token_ids,
        logprobs=reply.logprobs,
        finish_reason=reply.finish_reason,
        versions=reply.versions,
        sampling=request.sampling,
        text=reply.text,
        engine=engine.replica.name,
        cached_tokens=reply.cached_tokens,
    )


def as_fleet_error(engine: Engine, error: Exception) -> FleetError:
    """Whatever goes wrong in talking to an engine ends that engine, and its samples are told why."""
    if isinstance(error, FleetError):
        return error
    return FleetError(engine.replica.name, "raised", f"{type(error).__name__}: {error}")
