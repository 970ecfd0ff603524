"""The controller's side of the engines: samples go to the least loaded or to where their prefix is, and elsewhere when an
engine dies."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from milkweed.errors import ConfigError, DataError, DeadlineExceeded, FleetError, PeerDied
from milkweed.rollout.affinity import Prefixes
from milkweed.rollout.answers import grown
from milkweed.rollout.crew import Crew
from milkweed.rollout.protocol import (
    Begun,
    Collected,
    EngineReply,
    EngineRequest,
    EngineStats,
    SampleError,
    decode_collected,
    encode,
)
from milkweed.rollout.records import Deadlines, Engine, EngineReplica, Pending, as_fleet_error, completion
from milkweed.rollout.updates import SILENT_S, Updates
from milkweed.types import Completion, PolicyVersion, Sampling

if TYPE_CHECKING:
    from milkweed.fleet import Fleet
    from milkweed.rollout.launch import Launcher

POLL_S = 5.0
"""How long an engine holds a call to `collect` that has nothing to answer; with it the engine is heard of."""
LINGER_S = 0.02
"""How long an engine gathers further replies for one message. The last ones of a burst never wait."""
SEND_AT = 32
"""Samples of one message to an engine, at most."""
RESENDS = 2
"""Engines that may die under a request before it is given up, lest one request take all of them down."""


class Router(Updates):
    """Samples from all engines as from one.

    Each sample goes to the engine with the fewest samples in flight, where for each 1000 tokens of its prompt that an
    engine holds the KV of, that one may have `overlap_score_weight` more; at most `max_in_flight` are given to an engine, the
    rest wait here in order. Samples asked for in one turn of the event loop travel together. Make it with `spawn`, or
    from started engines with `Router(replicas, stats)`; the last `standby` of them get no samples until another fails.

    With `on_lost` set somebody brings new engines (`join`): samples then wait for these where no engine serves, until
    `end` says that none will come.
    """

    def __init__(
        self,
        replicas: Sequence[EngineReplica],
        stats: Sequence[EngineStats],
        *,
        max_in_flight: int = 256,
        standby: int = 0,
        overlap_score_weight: float = 16.0,
    ) -> None:
        if len(replicas) <= standby:
            raise ValueError("a router needs at least one engine that serves")
        self.crew = Crew(replicas, stats, len([s for s in stats if not s.port]) - standby)
        self.on_lost: Callable[[EngineReplica, FleetError], None] | None = None
        """Told of every engine that failed, once."""
        self.launcher: Launcher | None = None
        """Where further engines come from."""
        self.scaling: Callable[..., Awaitable[None]] | None = None
        self._ended: FleetError | None = None
        self.max_in_flight = max_in_flight
        self.version = min(s.version for s in stats)
        """The newest version that any engine serves; engines that missed it get no samples."""
        self._waiting: deque[Pending] = deque()
        self._prefixes = Prefixes(overlap_score_weight)
        self._ids = (f"r{n}." for n in itertools.count())  # SGLang aborts all that begin so, and "r1" would take "r10" along
        self._in_flight, self._busy_s = 0, 0.0
        self._deadlines = Deadlines(lambda p: p.future.done() or p.future.set_exception(TimeoutError()))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        for engine in self.crew:
            engine.collector = asyncio.create_task(self._collect(engine), name=f"replies of {engine.replica.name}")

    @classmethod
    async def spawn(
        cls,
        fleet: Fleet,
        model: str,
        *,
        version: PolicyVersion = PolicyVersion(),
        dtype: str = "float32",
        role: str = "rollout",
        max_in_flight: int = 256,
        deadline_s: float = 300.0,
    ) -> Router:
        """Starts the fleet's engines of `role` (rollout, teacher) on the Hugging Face folder `model`, at `version`.
        Raises FleetError (an engine did not come up), ConfigError or DataError; what had started is stopped then."""
        from milkweed.rollout.launch import Launcher

        launcher = Launcher(fleet, model, role=role, version=version, dtype=dtype, deadline_s=deadline_s)
        up = await launcher.all()
        c, replicas, stats = fleet.mesh.engines(role), [r for r, _ in up], [s for _, s in up]
        if any(s.port for s in stats):
            from milkweed.rollout.pairing import PairedRouter

            cls = PairedRouter
        router = cls(replicas, stats, max_in_flight=max_in_flight, standby=c.standby, overlap_score_weight=c.overlap_score_weight)
        router.launcher = launcher
        return router

    # ---- engines come and go

    async def scale(self, engines: int, *, within_s: float = 30.0) -> None:
        """Let `engines` engines serve, while samples go on. Those to come serve once they have the weights; those that
        leave finish what they have within `within_s` seconds, and what is left then goes on elsewhere. Raises
        ConfigError or what kept a new one from serving."""
        if self.scaling is None:
            raise ConfigError("rollout.scale: these engines were started one by one; only a mesh that is up has a supervisor to start others")
        await self.scaling(engines, within_s=within_s)

    def end(self, error: FleetError) -> None:
        """No engine will come any more: whoever waits for one is told why."""
        self._ended = error
        waiting, self._waiting = self._waiting, deque()
        for p in waiting:
            self._place(p)

    @property
    def expects(self) -> bool:
        """Whether somebody brings engines for those that fail."""
        return self.on_lost is not None and self._ended is None and not self._closed

    # ---- samples

    async def sample(
        self,
        token_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        name: str = "",
        deadline_s: float = 900.0,
    ) -> Completion:
        """One completion of `token_ids`. `name` says in errors whose sample it was.

        Raises DataError for a request that fits no engine (a prompt longer than the context), SampleError when
        sampling it failed, FleetError when no engine is left, DeadlineExceeded after `deadline_s`. Cancelling the call
        stops the sample in its engine.
        """
        request = EngineRequest(next(self._ids), list(token_ids), sampling or Sampling(), name)
        return completion(request, *await self._ask(request, deadline_s))

    async def score(self, token_ids: Sequence[int], top: int, *, name: str, deadline_s: float = 900) -> EngineReply:
        """How likely each of `token_ids` is given those before it, at temperature 1: `logprobs` (0 for the first), and
        the `top` likeliest words for each token after the first in `top_ids` and `top_logprobs`, best first. Nothing is
        sampled. Raises as `sample` does."""
        request = EngineRequest(next(self._ids), list(token_ids), Sampling(), name, top)
        return (await self._ask(request, deadline_s))[0]

    async def _ask(self, request: EngineRequest, deadline_s: float) -> tuple[EngineReply, Engine]:
        """The answer to `request`, and whose it is."""
        if self._closed:
            raise FleetError("rollout", "refused", "the router was closed")
        p = Pending(request, asyncio.get_running_loop().create_future())
        self._enter()
        due = self._deadlines.add(p, deadline_s)
        try:
            self._place(p)
            reply = await p.future
        except TimeoutError:
            where = p.engine.replica.name if p.engine else "rollout"
            cause = f"sample {request.name or request.id} was not done within {deadline_s:g} s"
            raise DeadlineExceeded(where, "hung", cause) from None
        finally:
            self._deadlines.discard(p, due)
            self._drop(p)
            self._leave()
        if reply.error is not None:
            raise DataError(reply.error) if reply.blame == "request" else SampleError(reply.error)
        assert p.engine is not None
        return reply, p.engine

    def _place(self, p: Pending) -> None:
        """Gives `p` to an engine or lets it wait; fails it when no engine can ever take it."""
        if p.future.done():
            return
        least = self.crew.by_load.least()
        if least is None and not self.expects:
            p.future.set_exception(self._ended or self._nobody())
            return
        if least is None or len(least.pending) >= self.max_in_flight:
            self._waiting.append(p)
            return
        engine = self._prefixes.choose(p, self.version, least, self.max_in_flight)
        self._prefixes.given(engine, p)
        self._put(p, engine)

    def _put(self, p: Pending, engine: Engine) -> None:
        p.engine = engine
        p.sent_at = asyncio.get_running_loop().time()
        self._give(p, engine)

    def _give(self, p: Pending, engine: Engine) -> None:
        engine.pending[p.request.id] = p
        self.crew.changed(engine)
        engine.outbox.append(p.request)
        if len(engine.outbox) == 1:
            self._spawn(self._send(engine))
        elif len(engine.outbox) == SEND_AT:
            self._post(engine)

    def _drop(self, p: Pending) -> None:
        """Forgets `p`; what its engine still does for it is stopped."""
        if p.engine is None:
            if p in self._waiting:
                self._waiting.remove(p)
        elif self._take_back(p, p.engine):
            self._fill()

    def _take_back(self, p: Pending, engine: Engine) -> bool:
        """Whether `engine` had it; it stops then."""
        if engine.pending.pop(p.request.id, None) is None:
            return False
        self.crew.changed(engine)
        if p.request in engine.outbox:
            engine.outbox.remove(p.request)
        elif engine.dead is None:
            engine.aborts.append(p.request.id)
            if len(engine.aborts) == 1:
                self._spawn(self._send_aborts(engine))
        return True

    def _fill(self) -> None:
        while self._waiting and self._room():
            self._place(self._waiting.popleft())

    def _room(self) -> bool:
        """Whether a sample can be given to somebody now."""
        engine = self.crew.by_load.least()
        return engine is not None and len(engine.pending) < self.max_in_flight

    def _served(self) -> bool:
        """Whether samples can be given to somebody at all."""
        return any(e.usable for e in self.crew)

    async def _send(self, engine: Engine) -> None:
        await asyncio.sleep(0)  # let everyone who asks in this turn come aboard
        self._post(engine)

    def _post(self, engine: Engine) -> None:
        """What is in the outbox leaves now, not when the event loop next comes round: an engine begins on the first samples
        of a step while the others are still being asked for."""
        batch, engine.outbox = engine.outbox, []
        if batch and engine.dead is None:
            self._spawn(self._told(engine, engine.replica.call_one("submit", encode(batch), deadline_s=SILENT_S)))

    async def _send_aborts(self, engine: Engine) -> None:
        await asyncio.sleep(0)
        batch, engine.aborts = engine.aborts, []
        await self._tell(engine, "abort", batch, deadline_s=SILENT_S)

    async def _tell(self, engine: Engine, endpoint: str, *args: Any, deadline_s: float) -> None:
        if engine.dead is None:
            await self._told(engine, engine.replica.call_one(endpoint, *args, deadline_s=deadline_s))

    async def _told(self, engine: Engine, answer: Awaitable[Any]) -> None:
        try:
            await answer
        except Exception as e:
            self._lose(engine, as_fleet_error(engine, e))

    async def _collect(self, engine: Engine) -> None:
        while engine.dead is None:
            try:
                raw = await engine.replica.call_one("collect", POLL_S, LINGER_S, deadline_s=POLL_S + SILENT_S)
                collected = decode_collected(raw)
            except Exception as e:
                self._lose(engine, as_fleet_error(engine, e))
                return
            self._take(engine, collected)

    def _take(self, engine: Engine, collected: Collected) -> None:
        engine.stats = stats = collected.stats
        again: list[tuple[Pending, str]] = []
        for news in collected.progress:
            if (p := engine.pending.get(news.id)) is not None:
                p.begun = grown(p.begun, news)
        for reply in collected.replies:
            p = engine.pending.pop(reply.id, None)
            if p is None or p.future.done():  # cancelled here, or sent elsewhere since
                continue
            failed = reply.error is not None and reply.blame in ("engine", "pair")
            given_back = engine.parting and (reply.finish_reason == "abort" or (failed and reply.blame == "pair"))
            if (failed or given_back) and reply.token_ids:
                p.begun = Begun(reply.token_ids, reply.logprobs, reply.versions)
            if given_back:
                self._hand_over(engine, [p])
            elif failed:
                again.append((p, str(reply.error)))
            else:
                self._done(engine, p, reply)
        self.crew.changed(engine)
        if stats.state == "dead":
            self._lose(engine, PeerDied(engine.replica.name, "died", stats.cause), [p for p, _ in again])
            return
        if stats.state == "broken" and engine.stale is None:
            engine.stale = stats.cause
        for p, cause in again:
            self._resend(engine, p, stats.cause or cause)
        self._fill()

    def _done(self, engine: Engine, p: Pending, reply: EngineReply) -> None:
        self._prefixes.sampled(engine, p, reply.token_ids)
        engine.paced(p, len(reply.token_ids), asyncio.get_running_loop().time())
        p.future.set_result(reply)

    def _lose(self, engine: Engine, error: FleetError, more: Sequence[Pending] = ()) -> None:
        """The engine serves no more; its samples go on elsewhere."""
        if engine.dead is not None:
            return
        engine.dead = error
        self._prefixes.forget(engine)
        self.crew.muster()
        engine.outbox, engine.aborts = [], []
        lost, engine.pending = [*more, *engine.pending.values()], {}
        for p in lost:
            self._resend(engine, p, str(error))
        if not self.expects and not self._served():
            waiting, self._waiting = self._waiting, deque()
            for p in waiting:
                self._place(p)
        if not self._closed:
            self._spawn(engine.replica.stop())
            if self.on_lost is not None and not engine.leaving:
                self.on_lost(engine.replica, error)

    def _resend(self, engine: Engine, p: Pending, cause: str) -> None:
        """To others than `engine`, which failed under it, or the same with others."""
        p.lost.append(engine.replica.name)
        p.elsewhere()
        if p.future.done():
            return
        if len(p.lost) > RESENDS:
            who = p.request.name or p.request.id
            p.future.set_exception(SampleError(f"sample {who}: {', '.join(p.lost)} failed under it, the last: {cause}"))
        else:
            self._place(p)

    def _nobody(self) -> FleetError:
        causes = "; ".join(str(e.dead) if e.dead else f"{e.replica.name}: {e.stale}" for e in self.crew)
        return FleetError("rollout", "refused", f"no engine can sample: {causes}")

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- looking

    @property
    def busy_s(self) -> float:
        """Seconds that sampling has taken, measured inside the engines: of each stretch in which samples were in
        flight, the time of the engine that was busy longest."""
        return self._busy_s + (self.crew.stretch_s() if self._in_flight else 0.0)

    @property
    def idle_at(self) -> float:
        """When the last request of any engine ended, measured there (Unix time)."""
        return max((e.stats.idle_at for e in self.crew), default=0.0)

    def _enter(self) -> None:
        if self._in_flight == 0:
            self.crew.begin_stretch()
        self._in_flight += 1

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._busy_s += self.crew.stretch_s()

    async def close(self, *, deadline_s: float = 15.0) -> None:
        """Ends the engines. Samples in flight get a FleetError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        living = self.crew.living
        for engine in living:
            if engine.collector is not None:
                engine.collector.cancel()
            self._lose(engine, FleetError(engine.replica.name, "refused", "the router was closed"))
        for task in list(self._tasks):
            task.cancel()
        ends = (e.replica.call_one("close", deadline_s=deadline_s) for e in living)
        for engine, end in zip(living, await asyncio.gather(*ends, return_exceptions=True), strict=True):
            if isinstance(end, BaseException) and not isinstance(end, FleetError):
                raise end
            await engine.replica.stop()
