"""Scoring from the controller: many concurrent `score` calls become few messages to the reward workers.

    score(fn, ...) ─┐  2 ms                    ┌─ child: fn(...)   killed at its deadline with all it started
    score(fn, ...) ─┼──────► submit ► queue ──►┤
    score(fn, ...) ─┘  one message, many items └─ child: fn(...)
          ▲                                        │
          └── futures ◄── collect (long poll) ◄────┘  one answer, many outcomes

Who waits: `score` on its future. It is resolved by the collector, which hears of every item, since each item ends by
its deadline; or by the loss of the worker, which the replica reports: then its items go to another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from milkweed.environments.children import KEPT, Limits, ScoringPool
from milkweed.environments.items import Item, Outcome, decode_items, decode_outcomes, encode
from milkweed.environments.shipped import dumps, dumps_function, label
from milkweed.errors import FleetError, RewardError

Reward = Callable[..., "float | dict[str, float] | Awaitable[float | dict[str, float]]"]
"""`reward(prompt, completion)`, plain or async: a finite number, or a dict of parts (finite numbers) whose `reward` is
the reward; without that key their sum is. An attribute `prepare` (a function without arguments) runs once in each
child before the first item, outside its deadline: for slow imports."""

POLL_S = 5.0
GRACE_S = 60.0
RESENDS = 2


class Score(NamedTuple):
    """A reward and its parts, as `Completion.trajectory` takes them: `completion.trajectory(*score)`."""

    reward: float
    parts: dict[str, float]


class Worker(Protocol):
    """What a scorer needs of a replica (`fleet.Replica` has it)."""

    name: str

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any: ...


class LocalWorker:
    """A pool in this process, for library use without a mesh. Its children are processes all the same."""

    def __init__(self, children: int = 2, limits: Limits | None = None) -> None:
        self.name = "local reward pool"
        self._pool = ScoringPool(children, limits)

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        async with asyncio.timeout(deadline_s):
            if endpoint == "submit":
                return self._pool.submit(decode_items(args[0]), *args[1:])
            return encode(await asyncio.to_thread(getattr(self._pool, endpoint), *args))

    def close(self) -> None:
        self._pool.close()


class _Job(NamedTuple):
    item: Item
    label: str
    future: asyncio.Future[Score]
    sends: int


class _Lane:
    """One worker with what was sent to it and has not come back."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.out: dict[int, _Job] = {}
        self.known: list[str] = []
        self.cancelled: list[int] = []
        self.collector: asyncio.Task[None] | None = None
        self.stats: dict[str, float] = {}


class Scorer:
    """Scores samples on reward workers. Use from one event loop at a time.

    `workers` are replicas of `RewardActor`; `Scorer.local()` needs no mesh. `deadline_s` is how long one item may
    run, unless `score` says otherwise; waiting for a free child does not count.
    """

    def __init__(self, workers: Sequence[Worker], *, deadline_s: float = 10.0, window_s: float = 0.002) -> None:
        self.deadline_s, self._window_s = deadline_s, window_s
        self._lanes = [_Lane(w) for w in workers]
        self._waiting: list[_Job] = []
        self._flush: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._pickled: dict[Any, tuple[float, str]] = {}
        self._blobs: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost: FleetError | None = None
        self.on_lost: Callable[[Worker, FleetError], None] | None = None  # whoever sets it brings others, and items wait
        self.calls = 0
        """Messages sent to workers."""

    @classmethod
    def local(cls, children: int = 2, *, deadline_s: float = 10.0, limits: Limits | None = None) -> Scorer:
        """A scorer with its own children, in this process's care."""
        return cls([LocalWorker(children, limits)], deadline_s=deadline_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one item ran, measured in the workers; the sum over them, as last heard."""
        return sum(lane.stats.get("busy_s", 0.0) for lane in self._lanes)

    @property
    def idle_at(self) -> float:
        """When the last item of any worker ended, measured there (Unix time), as last heard."""
        return max((lane.stats.get("idle_at", 0.0) for lane in self._lanes), default=0.0)

    async def score(self, fn: Reward, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Score:
        """`fn(*args, **kwargs)` in a child process, killed with all it started after `deadline_s`.

        By convention `args` are the prompt and the completion's text. `fn` goes by value where it was defined in a
        script, a notebook cell or a module that is not installed; it is read again at most once a second.
        Raises RewardError naming what happened and the prompt: the function raised, gave no finite number, passed
        its deadline, or ended its process. Raises FleetError when no worker is left.
        """
        return await self._score(self._key(fn), dumps((args, kwargs)), label(args), deadline_s)

    async def score_packed(
        self, key: str, blob: bytes, payload: bytes, label: str, deadline_s: float | None = None
    ) -> Score:
        """`score` of a call that another process packed with `packed`."""
        self._blobs.pop(key, None)
        self._blobs[key] = blob  # newest last
        return await self._score(key, payload, label, deadline_s)

    async def _score(self, key: str, payload: bytes, label: str, deadline_s: float | None) -> Score:
        if self._lost is not None or not (self._lanes or self.on_lost):
            raise self._lost or FleetError("reward", "refused", "the mesh has no reward workers")
        item = Item(next(self._ids), key, payload, deadline_s or self.deadline_s)
        job = _Job(item, label, asyncio.get_running_loop().create_future(), 0)
        self._waiting.append(job)
        self._schedule()
        try:
            return await job.future
        except asyncio.CancelledError:
            for lane in self._lanes:
                if lane.out.pop(item.id, None):
                    lane.cancelled.append(item.id)
            raise

    def join(self, worker: Worker) -> None:
        """A further worker."""
        self._lanes.append(_Lane(worker))
        self._schedule()  # what has waited for it

    def lost(self, worker: Worker, error: FleetError) -> None:
        """That worker is gone; what it had is scored elsewhere."""
        for lane in [lane for lane in self._lanes if lane.worker is worker]:
            self._lane_failed(lane, error)

    def end(self, error: FleetError) -> None:
        """No worker will come any more: whoever waits for one is told why."""
        self._lost, self.on_lost = error, None
        self._fail_all(error)

    async def close(self) -> None:
        """Stop waiting; end the children that are ours. Replicas are stopped by their fleet."""
        await self._end(FleetError("reward", "refused", "the scorer was closed"))
        for lane in self._lanes:
            if isinstance(lane.worker, LocalWorker):
                await asyncio.to_thread(lane.worker.close)
        if _installed and _installed[-1] is self:
            _installed.pop()

    async def _end(self, error: FleetError) -> None:
        self._lost = error
        tasks = [t for t in (self._flush, *(lane.collector for lane in self._lanes), *self._tasks) if _mine(t)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(error)

    def _key(self, fn: Reward) -> str:
        now = time.monotonic()
        held = self._pickled.get(fn)
        if held is not None and now - held[0] < 1.0:
            return held[1]
        blob = dumps_function(fn)
        key = hashlib.blake2b(blob, digest_size=16).hexdigest()
        self._blobs.pop(key, None)
        self._blobs[key] = blob  # newest last
        self._pickled.pop(fn, None)
        self._pickled[fn] = (now, key)
        while len(self._pickled) > KEPT:
            self._pickled.pop(next(iter(self._pickled)))
        return key

    def _schedule(self) -> None:
        if not _mine(self._flush):
            self._flush = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        """Send what is waiting, again and again until nothing is."""
        while True:
            await asyncio.sleep(self._window_s)
            jobs, self._waiting = [j for j in self._waiting if not j.future.done()], []
            if not jobs:
                return
            lanes = [lane for lane in self._lanes if getattr(lane.worker, "failure", None) is None]
            if not lanes and self.on_lost is not None:
                self._waiting += jobs  # `join` sends them
                return
            shares: list[list[_Job]] = [[] for _ in lanes]
            for job in jobs:
                if not lanes:
                    job.future.set_exception(self._lost or FleetError("reward", "lost", "no reward worker is left"))
                    continue
                i = min(range(len(lanes)), key=lambda i: len(lanes[i].out) + len(shares[i]))
                shares[i].append(job)
            for lane, share in zip(lanes, shares, strict=True):
                if share:
                    lane.out.update((j.item.id, j) for j in share)
                    self._spawn(self._submit(lane, share))
                    if not _mine(lane.collector):
                        lane.collector = asyncio.get_running_loop().create_task(self._collect(lane))
            self._trim()

    async def _submit(self, lane: _Lane, jobs: list[_Job]) -> None:
        keys = list(dict.fromkeys(j.item.function for j in jobs))
        new = {k: self._blobs[k] for k in keys if k not in lane.known}
        lane.known = [*(k for k in lane.known if k not in keys), *keys][-(KEPT // 2) :]
        cancelled, lane.cancelled = lane.cancelled, []
        try:
            self.calls += 1
            await lane.worker.call_one("submit", encode([j.item for j in jobs]), new, cancelled, deadline_s=GRACE_S)
        except (FleetError, TimeoutError) as error:
            self._lane_failed(lane, error)

    async def _collect(self, lane: _Lane) -> None:
        """Long-poll the worker until nothing is out."""
        while lane.out:
            try:
                self.calls += 1
                raw = await lane.worker.call_one("collect_stats", POLL_S, deadline_s=POLL_S + GRACE_S)
                outcomes, lane.stats = decode_outcomes(raw)
            except (FleetError, TimeoutError) as error:
                self._lane_failed(lane, error)
                return
            for outcome in outcomes:
                job = lane.out.pop(outcome.id, None)
                if job is not None and not job.future.done():
                    _resolve(job, outcome)

    def _lane_failed(self, lane: _Lane, error: Exception) -> None:
        """A worker is gone: its items go elsewhere, as scoring twice harms nobody."""
        if lane not in self._lanes:
            return
        self._lanes.remove(lane)
        if not isinstance(error, FleetError):
            error = FleetError(lane.worker.name, "hung", "did not answer")
        if not self._lanes and self.on_lost is None:
            self._lost = error
        for job in lane.out.values():
            if job.future.done():
                continue
            if job.sends >= RESENDS:
                where = f" ({job.label})" if job.label else ""
                job.future.set_exception(RewardError(f"reward was lost with {job.sends + 1} workers{where}: {error}"))
            elif self._lost is not None:
                job.future.set_exception(error)
            else:
                self._waiting.append(job._replace(sends=job.sends + 1))
        lane.out.clear()
        self._schedule()
        if self.on_lost is not None:
            self.on_lost(lane.worker, error)

    def _fail_all(self, error: FleetError) -> None:
        for job in [*self._waiting, *(j for lane in self._lanes for j in lane.out.values())]:
            if not job.future.done():
                job.future.get_loop().call_soon(lambda f=job.future: f.done() or f.set_exception(error))
        self._waiting.clear()
        for lane in self._lanes:
            lane.out.clear()

    def _trim(self) -> None:
        """Forget pickled functions that nothing waits for."""
        used = {j.item.function for lane in self._lanes for j in lane.out.values()}
        used |= {j.item.function for j in self._waiting} | {key for _, key in self._pickled.values()}
        for key in [k for k in self._blobs if k not in used]:
            del self._blobs[key]

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _mine(task: asyncio.Task[Any] | None) -> bool:
    """Whether the task is alive in this loop; one of a loop that was closed will never end."""
    return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()


def _resolve(job: _Job, outcome: Outcome) -> None:
    if outcome.error is None and outcome.reward is not None:
        job.future.set_result(Score(outcome.reward, dict(outcome.parts)))
        return
    error = RewardError(f"reward {outcome.error}" + (f" ({job.label})" if job.label else ""))
    if outcome.trace:
        error.add_note(outcome.trace)
    job.future.set_exception(error)


_installed: list[Scorer] = []
_current: ContextVar[Scorer | None] = ContextVar("milkweed_scorer", default=None)


def install(scorer: Scorer) -> None:
    """Make `scorer` the one that `score` uses from now on, until it is closed."""
    _installed.append(scorer)


@contextlib.contextmanager
def use(scorer: Scorer) -> Iterator[Scorer]:
    """Make `scorer` the one that `score` uses inside this block, in this task and those it starts."""
    token = _current.set(scorer)
    try:
        yield scorer
    finally:
        _current.reset(token)


def current(policy: Any = None) -> Scorer:
    """The scorer to use: the policy handle's own, the block's, the one installed last; else one of this process's
    own, made now and ended with it."""
    found = getattr(policy, "scorer", None) or _current.get() or (_installed[-1] if _installed else None)
    if found is None:
        import atexit

        found = Scorer.local()
        for lane in found._lanes:
            atexit.register(lane.worker.close)  # type: ignore[attr-defined]
        install(found)
    return found


async def score(fn: Reward, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Score:
    """`Scorer.score` on the current scorer: what an environment calls to have a sample scored outside the controller.

    >>> async def env(task, policy):
    ...     completion = await policy.sample(task.token_ids)
    ...     return completion.trajectory(*await score(reward, task, completion.text))
    """
    return await current().score(fn, *args, deadline_s=deadline_s, **kwargs)
