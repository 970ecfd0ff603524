"""Model engines and a model trainer for tools/simulate.py: they keep time as real ones do, and make up the tokens."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from milkweed.rollout.answers import join, since
from milkweed.rollout.protocol import (
    Begun,
    Collected,
    CommitReport,
    EngineReply,
    EngineRequest,
    EngineStats,
    Progress,
    decode_requests,
    encode,
)
from milkweed.types import FinishReason, PolicyVersion, VersionSpan

MESH_UPDATE_S = 0.1


def _whole(request: EngineRequest, length: int, spans: list[tuple[int, PolicyVersion]]) -> Begun:
    """What was begun of `request` elsewhere, and `length` tokens more, of which those from each span's start on have its version."""
    edges = [*spans, (length, PolicyVersion())]
    versions = [VersionSpan(a, b, v) for (a, v), (b, _) in zip(edges, edges[1:]) if b > a]
    return join(request.begun, Begun([7] * length, [-0.5] * length, versions))


class EngineModel:
    """An engine as the router sees it. Every sample that runs gets one token a decode step, which takes `token_s +
    running_s * running`; those over `slots` wait. A commit lets what runs go on under the new version."""

    cpu_s = 0.0
    """Processor time of all models, which is not the controller's."""

    deaths = 0
    """Of all models."""
    factor = 1.0
    """How much slower all of them are at present."""
    tells = False
    """Whether it says how far its samples are, whenever it says anything."""

    def __init__(
        self, name: str, *, slots: int, token_s: float, running_s: float, length: Callable[[], int], restart_s: float = 0.0
    ) -> None:
        self.name, self.host = name, SimpleNamespace(name="host0")
        self.slots, self.token_s, self.running_s, self.length = slots, token_s, running_s, length
        self.stats = EngineStats(version=PolicyVersion(), state="serving", context_length=1 << 20)
        self._count = itertools.count()
        self._queue: deque[EngineRequest] = deque()
        self._running: dict[str, tuple[EngineRequest, float, int, list[tuple[int, PolicyVersion]]]] = {}
        self._ends: list[tuple[float, int, str]] = []
        self._clock = 0.0
        """Decode steps done, fractions too."""
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._replies: list[EngineReply] = []
        self._waiter: asyncio.Future[None] | None = None
        self._paused_until = 0.0
        self._told: dict[str, int] = {}
        self.restart_s = restart_s

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        began = time.process_time()
        try:
            if endpoint == "collect":
                if not self._replies:
                    EngineModel.cpu_s += time.process_time() - began
                    await self._wait(args[0], args[1])
                    began = time.process_time()
                replies, self._replies = self._replies, []
                return encode(Collected(replies, self.stats, self._progress() if self.tells else []))
            if endpoint == "submit":
                self._advance()
                self._queue.extend(decode_requests(args[0]))
                self._admit()
                self._schedule()
            elif endpoint == "abort":
                self._advance()
                gone = set(args[0])
                self._queue = deque(r for r in self._queue if r.id not in gone)
                for id in gone & self._running.keys():
                    request, start, length, spans = self._running.pop(id)
                    self._reply(request, start, min(length, int(self._clock - start)), spans, "abort")
                self._admit()
                self._schedule()
            elif endpoint == "close":
                if self._timer is not None:
                    self._timer.cancel()
            return None
        finally:
            EngineModel.cpu_s += time.process_time() - began

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def commit(self, version: PolicyVersion, seconds: float) -> CommitReport:
        """The weights change between two decode steps."""
        self._advance()
        self.stats.version = version
        self._paused_until = asyncio.get_running_loop().time() + seconds
        for id, (request, start, length, spans) in self._running.items():
            spans.append((min(length, int(self._clock - start)), version))
        self._schedule()
        return CommitReport(ok=True, state="serving", version=version, seconds=seconds)

    def die(self) -> None:
        """Its process is killed: what it had is lost, and it serves again after `restart_s`."""
        self._advance()
        lost = [*(r for r, *_ in self._running.values()), *self._queue]
        self._running.clear()
        self._queue.clear()
        self._replies += [EngineReply(id=r.id, finish_reason="error", error="the engine was killed", blame="engine") for r in lost]
        self._paused_until = asyncio.get_running_loop().time() + self.restart_s
        EngineModel.deaths += 1
        self._schedule()
        self._wake()

    @classmethod
    def slow_down(cls, engines: list[EngineModel], factor: float) -> None:
        """All of them go on at `factor` times the seconds of a decode step."""
        for engine in engines:
            engine._advance()
        cls.factor = factor
        for engine in engines:
            engine._schedule()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    async def _wait(self, within: float, linger: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # virtual hours would be full of empty polls: a model engine answers when it has something to say
        await self._waiter
        self._waiter = None
        await asyncio.sleep(linger)

    def _step_s(self) -> float:
        return (self.token_s + self.running_s * len(self._running)) * EngineModel.factor

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(self._at, min(now, self._paused_until))
        if self._running:
            self._clock += (now - begin) / self._step_s()
            self.stats.busy_s += now - self._at
        self._at = now
        while self._ends and (self._ends[0][0] <= self._clock + 1e-9 or self._ends[0][2] not in self._running):
            _, _, id = heapq.heappop(self._ends)
            if id in self._running:
                self._reply(*self._running.pop(id))
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            length = min(self.length(), 1 << 20)
            if request.begun is not None:
                length = max(1, length - len(request.begun.token_ids))
            self._running[request.id] = (request, self._clock, length, [(0, self.stats.version)])
            heapq.heappush(self._ends, (self._clock + length, next(self._count), request.id))

    def _reply(
        self, request: EngineRequest, start: float, length: int, spans: list[tuple[int, PolicyVersion]], reason: FinishReason = "stop"
    ) -> None:
        whole = _whole(request, length, spans)
        self.stats.tokens += length
        self._replies.append(
            EngineReply(id=request.id, token_ids=whole.token_ids, logprobs=whole.logprobs, finish_reason=reason, versions=whole.versions)
        )
        self._told.pop(request.id, None)
        self._wake()

    def _progress(self) -> list[Progress]:
        self._advance()
        news = []
        for id, (request, start, length, spans) in self._running.items():
            whole = _whole(request, min(length - 1, int(self._clock - start)), spans)
            told = self._told.get(id, len(request.begun.token_ids) if request.begun else 0)
            if len(whole.token_ids) > told:
                news.append(Progress(id, told, since(whole, told)))
                self._told[id] = len(whole.token_ids)
        return news

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._ends:
            loop = asyncio.get_running_loop()
            left = (self._ends[0][0] - self._clock) * self._step_s()
            self._timer = loop.call_at(max(loop.time(), self._paused_until) + max(left, 0.0), self._tick)

    def _tick(self) -> None:
        began = time.process_time()
        self._timer = None
        self._advance()
        self._schedule()
        EngineModel.cpu_s += time.process_time() - began


class SimulatedMesh:
    """What the loop needs of a mesh: a trainer's version, the router, and weights that arrive after `update_s`."""

    def __init__(self, router: Any, engines: list[EngineModel], *, train_s: float, update_s: float, beside: float = 1.0) -> None:
        self.rollout, self.engines = router, engines
        self.reward = self.chat = self.environment = None
        self.train_s, self.update_s, self.beside = train_s, update_s, beside
        self.version = PolicyVersion()
        self.update_deadline_s = 1e7

    async def train(self, factor: float = 1.0) -> None:
        shared = self.beside if any(e.busy for e in self.engines) else 1.0
        if shared != 1:
            EngineModel.slow_down(self.engines, shared)
        await asyncio.sleep(self.train_s * factor * shared)
        if shared != 1:
            EngineModel.slow_down(self.engines, 1.0)
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)

    async def publish(self, offered: Callable[[], None] = lambda: None) -> dict[str, float]:
        version = self.version
        offered()
        await asyncio.sleep(self.update_s)
        began = time.process_time()
        for engine in self.engines:
            engine.commit(version, self.update_s / 10)
        EngineModel.cpu_s += time.process_time() - began
        self.rollout.version = version
        self.rollout._fill()
        return {"update": self.update_s}
