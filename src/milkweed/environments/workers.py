"""Environments in worker processes, from the controller's side: what they ask for is answered here, in batches.

A trajectory runs in one of the workers (the one with the fewest). Its turns are sampled by the controller's own handle
of it, so that the router, the ledger and the limits see what they always see; its rewards go to the reward workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from milkweed import errors
from milkweed.environments.shipped import dumps_function
from milkweed.environments.workshop import LOST, Ask, Done, Workshop, WorkshopLimits, decode_event
from milkweed.errors import ConfigError, EnvironmentFailed, FleetError
from milkweed.types import Environment, Prompt, Trajectory

POLL_S = 5.0
GRACE_S = 60.0
WINDOW_S = 0.002
KNOWN = 8
ALONE = 4
"""Processes of one trajectory each that a worker has at the same time."""


class Raised(Exception):
    """An environment raised something that is none of Milkweed's errors, in its worker; `str` tells what and where."""


class Worker(Protocol):
    """What is needed of a replica (`fleet.Replica` has it)."""

    name: str

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any: ...


class LocalWorker:
    """A workshop in this process's care, for library use without a mesh."""

    def __init__(self, setup: bytes, limits: WorkshopLimits | None) -> None:
        self.name = "local environment worker"
        self._shop = Workshop(setup, limits)

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        async with asyncio.timeout(deadline_s):
            return await asyncio.to_thread(getattr(self._shop, endpoint), *args)

    def close(self) -> None:
        self._shop.close()


class _Job(NamedTuple):
    policy: Any
    future: asyncio.Future[Done]
    asked: set[asyncio.Task[None]]
    raised: list[Exception]


class _Lane:
    """One worker, the trajectories in it, and what it has yet to be told."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.jobs: dict[int, _Job] = {}
        self.alone = asyncio.Semaphore(ALONE)
        self.commands: list[tuple[Any, ...]] = []
        self.known: list[str] = []
        self.sending: asyncio.Task[None] | None = None
        self.hearing: asyncio.Task[None] | None = None


class EnvironmentWorkers:
    """Runs environments on `workers`, replicas of `EnvironmentActor` made with `setup_of(chat)`. Use from one event
    loop at a time."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._lanes = [_Lane(w) for w in workers]
        self._ids = itertools.count(1)
        self._blobs: dict[str, bytes] = {}
        self._keys: dict[Any, tuple[float, str]] = {}
        self._failure: FleetError | None = None
        self._came = asyncio.Event()
        self.on_lost: Callable[[Worker, FleetError], None] | None = None
        """Whoever sets it brings other workers (`join`), which trajectories then wait for, until `end` says that none come."""

    @classmethod
    def local(cls, count: int = 1, chat: Any = None, limits: WorkshopLimits | None = None) -> EnvironmentWorkers:
        """Workers of this process's own."""
        return cls([LocalWorker(setup_of(chat), limits) for _ in range(count)])

    async def run(
        self, environment: Environment, prompt: Prompt, policy: Any, *, alone: bool = False
    ) -> Trajectory | list[Trajectory]:
        """`await environment(prompt, policy)` in a worker; with `alone`, in a process that has no other trajectory.

        Raises what it raised where that is one of Milkweed's errors, `Raised` otherwise; EnvironmentFailed where its
        process died, hung or took too much; ConfigError where the environment cannot be sent; FleetError where no
        worker is left.
        """
        while not self._lanes:
            if self._failure is not None or self.on_lost is None:
                raise self._failure or FleetError("environment", "lost", "no environment worker is left")
            self._came.clear()
            await self._came.wait()
        key, blob = self._key(environment), _dumps((prompt, policy.sampling))
        lane = min(self._lanes, key=lambda lane: len(lane.jobs))
        async with lane.alone if alone else contextlib.nullcontext():
            return await self._run(lane, key, blob, policy, alone)

    async def _run(self, lane: _Lane, key: str, blob: bytes, policy: Any, alone: bool) -> Trajectory | list[Trajectory]:
        id = next(self._ids)
        job = lane.jobs[id] = _Job(policy, asyncio.get_running_loop().create_future(), set(), [])
        self._tell(lane, ("run", id, key, blob, alone))
        try:
            done = await job.future
        except asyncio.CancelledError:
            self._tell(lane, ("cancel", id))
            raise
        finally:
            lane.jobs.pop(id, None)
            for task in job.asked:
                task.cancel()
        if not done.error:
            return done.trajectories if done.several else done.trajectories[0]
        if done.error == LOST:
            raise EnvironmentFailed(f"{lane.worker.name}: its process {done.text}")
        if job.raised and type(job.raised[-1]).__name__ == done.error:
            raise job.raised[-1]
        kind = getattr(errors, done.error, None)
        if kind is not None and not issubclass(kind, FleetError):
            raise kind(done.text)
        raise Raised(f"{done.error}: {done.text}")

    def join(self, worker: Worker) -> None:
        """A new worker takes trajectories."""
        self._lanes.append(_Lane(worker))
        self._came.set()

    def lost(self, worker: Worker, error: FleetError) -> None:
        """The worker is gone, also where nobody was just talking to it."""
        for lane in [lane for lane in self._lanes if lane.worker is worker]:
            self._lose(lane, error)

    def end(self, error: FleetError) -> None:
        """No worker will come any more: whoever waits for one is told why."""
        self._failure = error
        self._came.set()

    async def close(self) -> None:
        """Stop waiting; end the processes that are ours. Replicas are stopped by their fleet."""
        lanes, self._lanes = self._lanes, []
        self.end(FleetError("environment", "refused", "the environment workers were closed"))
        tasks = [t for lane in lanes for t in (lane.sending, lane.hearing) if t is not None and not t.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in lanes:
            self._give_up(lane, FleetError("environment", "refused", "the environment workers were closed"))
            if isinstance(lane.worker, LocalWorker):
                await asyncio.to_thread(lane.worker.close)

    def _key(self, environment: Environment) -> str:
        """Pickled anew at most once a second, since what a cell's function closes over may have changed."""
        now = time.monotonic()
        held = self._keys.get(environment)
        if held is None or now - held[0] > 1.0:
            try:
                blob = dumps_function(environment)
            except errors.RewardError as error:
                raise ConfigError(
                    f"this environment cannot be sent to a worker process: {error.__cause__ or error}; let it make what it "
                    "needs by itself, or set [environment] replicas = 0 in the mesh file to run it in the controller"
                ) from error
            key = hashlib.blake2b(blob, digest_size=16).hexdigest()
            self._blobs[key] = blob
            while len(self._blobs) > KNOWN:
                self._blobs.pop(next(iter(self._blobs)))
            held = self._keys[environment] = (now, key)
            while len(self._keys) > KNOWN:
                self._keys.pop(next(iter(self._keys)))
        return held[1]

    # ---- what travels

    def _tell(self, lane: _Lane, command: tuple[Any, ...]) -> None:
        lane.commands.append(command)
        loop = asyncio.get_running_loop()
        if lane.sending is None or lane.sending.done():
            lane.sending = loop.create_task(self._send(lane))
        if lane.hearing is None or lane.hearing.done():
            lane.hearing = loop.create_task(self._hear(lane))

    async def _send(self, lane: _Lane) -> None:
        while lane.commands:
            await asyncio.sleep(WINDOW_S)
            commands, lane.commands = lane.commands, []
            keys = list(dict.fromkeys(c[2] for c in commands if c[0] == "run"))
            new = {k: self._blobs[k] for k in keys if k not in lane.known and k in self._blobs}
            lane.known = [*(k for k in lane.known if k not in keys), *keys][-KNOWN:]
            try:
                await lane.worker.call_one("push", commands, new, deadline_s=GRACE_S)
            except (FleetError, TimeoutError) as error:
                self._lose(lane, error)

    async def _hear(self, lane: _Lane) -> None:
        while lane.jobs:
            try:
                events = await lane.worker.call_one("pull", POLL_S, deadline_s=POLL_S + GRACE_S)
            except (FleetError, TimeoutError) as error:
                self._lose(lane, error)
                return
            for event in map(decode_event, events):
                job = lane.jobs.get(event.id) if isinstance(event, (Ask, Done)) else None
                if job is None or job.future.done():
                    continue
                if isinstance(event, Done):
                    job.future.set_result(event)
                else:
                    task = asyncio.get_running_loop().create_task(self._answer(lane, job, event))
                    job.asked.add(task)
                    task.add_done_callback(job.asked.discard)

    async def _answer(self, lane: _Lane, job: _Job, ask: Ask) -> None:
        good, value = True, None
        try:
            if ask.key:
                if job.policy.scorer is None:
                    raise ConfigError("the mesh has no reward workers, which this environment's reward needs")
                value = tuple(await job.policy.scorer.score_packed(ask.key, ask.blob, ask.payload, ask.label, ask.deadline_s))
            else:
                value = await job.policy.sample(ask.token_ids, ask.sampling)
        except Exception as error:  # raised where it was asked for
            good, value = False, error
            job.raised.append(error)
        self._tell(lane, ("reply", ask.id, ask.call, _dumps((good, value))))

    def _lose(self, lane: _Lane, error: Exception) -> None:
        """The worker itself is gone, not only its process."""
        gone = error if isinstance(error, FleetError) else FleetError(lane.worker.name, "hung", str(error))
        if lane in self._lanes:
            self._lanes.remove(lane)
            if self.on_lost is not None:
                self.on_lost(lane.worker, gone)
        if not self._lanes and self._failure is None and self.on_lost is None:
            self._failure = gone
        self._give_up(lane, error)

    def _give_up(self, lane: _Lane, error: Exception) -> None:
        for id, job in lane.jobs.items():
            if not job.future.done():
                job.future.set_result(Done(id, error=LOST, text=f"went with its worker: {error}"))


def setup_of(chat: Any) -> bytes:
    """What a worker makes its own `Chat` of."""
    return b"" if chat is None else pickle.dumps((str(chat.folder), chat.template_source, chat.options))


def _dumps(value: Any) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value))
