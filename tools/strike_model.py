"""Strikes on virtual time: Milkweed's own loop, router, supervisor and ledger over model engines that fail as told."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from milkweed.data import PromptStream
from milkweed.data.ledger import audit
from milkweed.errors import DeadlineExceeded, FleetError, PeerDied, RemoteError
from milkweed.fleet.supervision import Event, Supervisor
from milkweed.rollout.protocol import CommitReport, EngineStats, encode
from milkweed.rollout.router import POLL_S, SILENT_S, Router
from milkweed.runs.config import RunConfig
from milkweed.runs.flow import Flow
from milkweed.runs.virtual_time import run_virtual
from milkweed.transfer.manifest import Staged
from milkweed.types import PolicyVersion, Prompt, Sampling
from simulated import EngineModel

KINDS = ("kill engine", "stop engine", "raise in engine", "slow engine", "preempt engine", "flip bytes", "kill trainer", "kill controller")
WINDOWS = ("publish", "commit", "ledger write", "checkpoint rename")
"""Moments at which the controller (or, in a commit, an engine) is killed."""
STUCK_S = 900.0


class Tally(msgspec.Struct):
    """What came of the strikes: everything but `strikes`, `steps` and `recover_s` has to be 0 or empty."""

    strikes: int = 0
    lost: int = 0
    doubled: int = 0
    over_bound: int = 0
    hangs: int = 0
    orphans: int = 0
    recover_s: list[float] = []
    steps: int = 0
    hit: dict[str, int] = {}
    problems: list[str] = []


class StruckEngine(EngineModel):
    """An engine model that can die, hang, raise, slow down, or get its weights wrong."""

    tells = True

    def __init__(self, index: int, version: PolicyVersion, dice: random.Random, *, length: int, slots: int, token_s: float) -> None:
        super().__init__(f"rollout{index}", slots=slots, token_s=token_s, running_s=token_s / 20, length=lambda: dice.randint(1, 2 * length))
        self.stats = EngineStats(version=version, state="serving", context_length=1 << 20)
        self.failure: FleetError | None = None
        self.stopped = self.hung = self.dies_in_commit = self.flipped = False
        self._down = asyncio.Event()

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        if self.failure is not None:
            raise self.failure
        if endpoint == "commit":
            work = asyncio.ensure_future(self._take(msgspec.msgpack.decode(args[0], type=Staged).version))
        else:
            work = asyncio.ensure_future(super().call_one(endpoint, *args, deadline_s=deadline_s))
        down = asyncio.ensure_future(self._down.wait())
        try:
            await asyncio.wait({work, down}, return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
            return work.result()
        finally:
            down.cancel()
            work.cancel()

    async def _take(self, version: PolicyVersion) -> bytes:
        await asyncio.sleep(0.05)
        if self.dies_in_commit:
            self.fail(PeerDied(self.name, "died", "killed during its commit"))
        if self.hung:
            await asyncio.Event().wait()
        if self.flipped:
            self.flipped = False
            return encode(CommitReport(ok=False, state="serving", version=self.stats.version, message="bytes differ from their digest"))
        return encode(self.commit(version, 0.05))

    def fail(self, error: FleetError) -> None:
        if self.failure is None:
            self.failure = error
            if self._timer is not None:
                self._timer.cancel()
            self._down.set()

    def hang(self) -> None:
        """Silent from here on; whoever calls finds out at its deadline."""
        self.hung = True
        if self._timer is not None:
            self._timer.cancel()
        error = DeadlineExceeded(self.name, "hung", "no answer")
        asyncio.get_running_loop().call_later(POLL_S + SILENT_S, self.fail, error)

    def _schedule(self) -> None:
        if not self.hung and self.failure is None:
            super()._schedule()

    async def slow(self, factor: float, for_s: float) -> None:
        self._advance()
        self.token_s *= factor
        self._schedule()
        await asyncio.sleep(for_s)
        self._advance()
        self.token_s /= factor
        self._schedule()

    async def stop(self) -> None:
        self.stopped = True
        self.fail(PeerDied(self.name, "died", "it was stopped"))


class Scene(msgspec.Struct, kw_only=True):
    """What is struck."""

    engines: int = 3
    standby: int = 0
    staleness: int = 1
    groups: int = 4
    samples: int = 2
    length: int = 40
    slots: int = 4
    token_s: float = 0.05
    train_s: float = 6.0
    start_s: float = 30.0
    checkpoint_every: int = 4


class Life:
    """One controller's life, from a checkpoint to its end or its death. `mesh` is what the loop needs of one."""

    def __init__(self, scene: Scene, folder: Path, dice: random.Random, number: int, step: int) -> None:
        self.scene, self.folder, self.dice = scene, folder, dice
        self.version = PolicyVersion(number, step)
        self.saved = step
        self.engines = [self._engine(i) for i in range(scene.engines + scene.standby)]
        self.all = list(self.engines)
        self.router = Router(self.engines, [e.stats for e in self.engines], max_in_flight=scene.slots * 2, standby=scene.standby)
        self.events: list[Event] = []
        self.over: FleetError | None = None
        self.supervisor = Supervisor("rollout", self._bring, ended=self.router.end, note=self.events.append)
        for i in range(len(self.engines)):
            self.supervisor.serving(i)
        self.router.on_lost = lambda replica, error: self.supervisor.failed(int(replica.name[7:]), error)
        self.dead = asyncio.Event()
        self.trap = ""
        self.mended_s = 0.0
        self.turn = asyncio.Lock()
        mesh: Any = SimpleNamespace(rollout=self.router, reward=None, chat=None, update_deadline_s=1e4, publish=self._publish, weights=None, environment=None)
        self.mesh = mesh
        mesh.version = self.version
        config = RunConfig(steps=1 << 30, staleness=scene.staleness, trajectory_deadline_s=1e4)
        self.flow = Flow(config, folder, mesh, lambda text: None, threaded=False)
        self.flow.resume(self.version, same=True)
        self._commit = self.flow.ledger._commit
        self.flow.ledger._commit = self._write  # type: ignore[method-assign]

    def _engine(self, index: int) -> StruckEngine:
        s = self.scene
        return StruckEngine(index, self.version, self.dice, length=s.length, slots=s.slots, token_s=s.token_s)

    async def _bring(self, index: int) -> None:
        await asyncio.sleep(self.scene.start_s)
        engine = self._engine(index)
        engine.stats.version = PolicyVersion(0, 0)
        self.all.append(engine)
        async with self.turn:
            self.router.admit(engine, engine.stats)
            await self.router.join(engine.name, self._staged(self.router.version)["host0"])
        self.engines = [e for e in self.engines if e.name != engine.name] + [engine]

    @staticmethod
    def _staged(version: PolicyVersion) -> dict[str, Staged]:
        return {"host0": Staged(version, "", 0, 0, 0, [])}

    def _write(self, rows: Any) -> None:
        if self.trap == "ledger write" and rows:
            self.flow.ledger._segments.write()  # the bytes are there, the rows that speak of them never will be
            self.die()
        if not self.dead.is_set():
            self._commit(rows)

    def die(self) -> None:
        """The controller is killed: nothing that it still holds is ever written."""
        self.dead.set()

    def spring(self, window: str) -> None:
        if self.trap == window:
            self.die()

    async def _publish(self, offered: Any = lambda: None) -> dict[str, float]:
        version = self.mesh.version
        offered()
        await asyncio.sleep(0.1)
        self.spring("publish")
        async with self.turn:
            await self.router.update_weights(self._staged(version), version)
        self.spring("commit")
        return {"update": 0.1}

    async def train(self) -> None:
        await asyncio.sleep(self.scene.train_s + self.mended_s)
        self.mended_s = 0.0
        self.mesh.version = PolicyVersion(self.version.incarnation, self.mesh.version.step + 1)

    async def loop(self, stream: PromptStream, tally: Tally, steps: int | None = None) -> None:
        """Trains until it is cancelled, or for `steps` steps."""
        s = self.scene
        self.flow.place(stream, "train")

        async def env(prompt: Prompt, policy: Any) -> Any:
            completion = await policy.sample(prompt.token_ids)
            edges = [0, *(x for v in completion.versions for x in (v.start, v.end)), len(completion.token_ids)]
            if edges[::2] != edges[1::2]:
                raise AssertionError("tokens without a version")
            return completion.trajectory(reward=float(len(completion.token_ids) % 2))

        last = asyncio.get_running_loop().time()
        while steps is None or self.mesh.version.step < steps:
            await self.flow.take(env, stream, "train", groups=s.groups, samples=s.samples, sampling=Sampling(), keep=None)
            await self.train()
            self.flow.trained(self.mesh.version)
            await self.flow.publish()
            if self.mesh.version.step % s.checkpoint_every == 0:
                await self.flow.before_checkpoint()
                if self.dead.is_set():
                    return
                self.saved = self.mesh.version.step
                self.spring("checkpoint rename")
                self.flow.after_checkpoint(self.mesh.version)
            tally.steps += 1
            now = asyncio.get_running_loop().time()
            tally.hangs += now - last > STUCK_S
            last = now

    async def end(self) -> None:
        await self.supervisor.close()
        await self.flow.close()
        await self.router.close()


def stream() -> PromptStream:
    return PromptStream([Prompt(id=f"p{i}", messages=[], token_ids=[1] * 8) for i in range(500)], seed=1)


def simulate_strikes(count: int, seed: int, folder: Path, scene: Scene = Scene()) -> Tally:
    """`count` strikes on runs of `scene`, each audited. What is left of the runs' ledgers lies in `folder`."""
    tally, dice = Tally(), random.Random(seed)
    kinds = [*KINDS, *WINDOWS]
    order = [kinds[i % len(kinds)] for i in range(count)]
    dice.shuffle(order)
    for n in range(0, count, 25):
        run_virtual(_campaign(order[n : n + 25], folder / f"run{n // 25}", dice, tally, scene))
    return tally


async def _campaign(order: list[str], folder: Path, dice: random.Random, tally: Tally, scene: Scene) -> None:
    number = step = 0
    order = list(order)
    while True:
        life = Life(scene, folder, dice, number, step)
        work = asyncio.ensure_future(life.loop(stream(), tally))
        while order and not life.dead.is_set():
            if not await _quiet(life, work, dice.expovariate(1 / 15)):
                break
            kind = order.pop(0)
            tally.strikes += 1
            tally.hit[kind] = tally.hit.get(kind, 0) + 1
            await _strike(life, kind, work, dice)
            if not life.dead.is_set():
                await life.flow.ledger.flush()
                _audit(folder, tally, scene)
        if work.done() and not work.cancelled() and work.exception() is not None and not life.dead.is_set():
            tally.problems.append(f"the run ended: {work.exception()!r}")
            order.clear()
        work.cancel()
        await asyncio.wait([work])
        await life.end()
        tally.recover_s += [e.after_s for e in life.events if e.what == "replaced"]
        tally.orphans += sum(not e.stopped for e in life.all)
        _audit(folder, tally, scene)
        if not order:
            return
        number, step = number + 1, life.saved


async def _quiet(life: Life, work: asyncio.Future[None], seconds: float) -> bool:
    dead = asyncio.ensure_future(life.dead.wait())
    await asyncio.wait({work, dead}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    dead.cancel()
    return not (work.done() or life.dead.is_set())


async def _strike(life: Life, kind: str, work: asyncio.Future[None], dice: random.Random) -> None:
    engine = dice.choice(life.engines)
    if kind == "kill engine":
        engine.fail(PeerDied(engine.name, "died", "by SIGKILL"))
    elif kind == "stop engine":
        engine.hang()
    elif kind == "raise in engine":
        engine.fail(RemoteError(engine.name, "raised", "RuntimeError: struck"))
    elif kind == "slow engine":
        life.router._spawn(engine.slow(10.0, 30.0))
    elif kind == "preempt engine":
        if life.router.crew.find(engine.name) is not None:
            life.router._spawn(life.router.leave(engine.name, within_s=5.0))
            life.supervisor.failed(int(engine.name[7:]), PeerDied(engine.name, "lost", "its host is about to be taken away"))
    elif kind == "flip bytes":
        engine.flipped = True
    elif kind == "kill trainer":
        life.mended_s = 20.0 + (life.mesh.version.step - life.saved) * life.scene.train_s
    elif kind == "kill controller":
        life.die()
    elif kind == "commit" and dice.random() < 0.5:
        engine.dies_in_commit = True
    else:
        life.trap = kind
    # half of the time the next strike comes before this one is mended
    await _quiet(life, work, STUCK_S if life.trap else dice.choice((5.0, 40.0)))


def _audit(folder: Path, tally: Tally, scene: Scene) -> None:
    report = audit(folder, tokens=False)
    tally.lost += abs(report.issued - report.trained - sum(report.dropped.values()) - report.held)
    tally.over_bound += report.max_lag > scene.staleness
    tally.problems += report.problems
    tally.doubled += sum("twice" in p or "doubl" in p for p in report.problems)


def throughput(scene: Scene, steps: int, mean_life_s: float, seed: int, folder: Path) -> tuple[float, Counter[str]]:
    """Virtual seconds for `steps` steps, engines dying `mean_life_s` apart each (0: never), and the faults."""

    async def run() -> tuple[float, Counter[str]]:
        dice = random.Random(seed)
        life = Life(scene, folder, dice, 0, 0)

        async def deaths(index: int) -> None:
            while True:
                await asyncio.sleep(dice.expovariate(1 / mean_life_s))
                for e in life.engines:
                    if e.name == f"rollout{index}":
                        e.fail(PeerDied(e.name, "died", "by SIGKILL"))

        ends = [asyncio.ensure_future(deaths(i)) for i in range(len(life.engines))] if mean_life_s else []
        began = asyncio.get_running_loop().time()
        await life.loop(stream(), Tally(), steps)
        took = asyncio.get_running_loop().time() - began
        for task in ends:
            task.cancel()
        await life.end()
        return took, Counter(e.what for e in life.events)

    return run_virtual(run())
