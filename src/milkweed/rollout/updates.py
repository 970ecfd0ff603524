"""The router's part where engines come, go, and change their weights."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from milkweed.errors import DeadlineExceeded, FleetError, PeerDied, TransferError
from milkweed.rollout.affinity import Prefixes
from milkweed.rollout.crew import Crew
from milkweed.rollout.protocol import (
    CommitReport,
    EngineReply,
    EngineRequest,
    EngineStats,
    SampleError,
    decode_report,
    encode,
)
from milkweed.rollout.records import Engine, EngineReplica, Pending, UpdateReport, as_fleet_error
from milkweed.transfer.manifest import Staged
from milkweed.types import PolicyVersion, Sampling

SILENT_S = 20.0
"""How much longer than it may take until an engine that does not answer counts as hung."""
PARTING_S = 1.0
"""How long an engine that leaves may take to give back what it has not finished."""


class Updates(ABC):
    """What `Router` does with engines as a whole."""

    crew: Crew
    version: PolicyVersion
    _ids: Iterator[str]
    _waiting: deque[Pending]
    _prefixes: Prefixes
    paired = False
    """Whether engines prefill or decode only."""
    turns = 0
    """Odd while versions change hands."""

    @property
    @abstractmethod
    def expects(self) -> bool:
        """Whether somebody brings engines for those that fail."""

    @abstractmethod
    def _lose(self, engine: Engine, error: FleetError) -> None: ...

    @abstractmethod
    def _fill(self) -> None: ...

    @abstractmethod
    def _put(self, p: Pending, engine: Engine) -> None: ...

    @abstractmethod
    def _drop(self, p: Pending) -> None: ...

    @abstractmethod
    def _place(self, p: Pending) -> None: ...

    @abstractmethod
    async def _tell(self, engine: Engine, endpoint: str, *args: Any, deadline_s: float) -> None: ...

    @abstractmethod
    def _nobody(self) -> FleetError: ...

    @abstractmethod
    def _collect(self, engine: Engine) -> Any: ...

    def admit(self, replica: EngineReplica, stats: EngineStats) -> None:
        """A new engine is here; it serves nothing before its first commit."""
        engine = self.crew.add(replica, stats)
        engine.collector = asyncio.create_task(self._collect(engine), name=f"replies of {replica.name}")

    async def join(self, name: str, staged: Staged | None, *, deadline_s: float = 60.0) -> None:
        """An admitted engine takes samples once it has committed `staged`, the version that is served (None: the one it
        was started with). Raises TransferError where it could not."""
        engine = self.crew.find(name)
        if engine is None:
            raise TransferError(f"{name} died before it had got the weights")
        if staged is not None:
            report = await self._commit(engine, staged, deadline_s)
            if not report.ok:
                raise TransferError(f"{name} did not take version {staged.version}: {report.message}")
        elif engine.stats.version == self.version:
            engine.stale = None
        if engine.stale is not None:
            raise TransferError(f"{name} serves {engine.stats.version}, the others {self.version}: {engine.stale}")
        self.crew.muster()
        self._fill()

    async def leave(self, name: str, *, within_s: float) -> None:
        """An engine finishes what it has, for `within_s` at most; the rest goes to others, with its tokens. Then it ends."""
        engine = self.crew.find(name)
        if engine is None:
            return
        engine.leaving = True
        self._hand_over(engine, [p for p in engine.pending.values() if p.request in engine.outbox])
        await self._emptied(engine, within_s)
        engine.parting = True
        if engine.pending and engine.dead is None:
            keep = [True] if engine.stats.files else []  # its KV, for those who go on
            await self._tell(engine, "abort", list(engine.pending), *keep, deadline_s=PARTING_S)
            await self._emptied(engine, PARTING_S)
        self._hand_over(engine, list(engine.pending.values()))
        self._lose(engine, FleetError(name, "refused", "it was taken out of service"))
        if engine in self.crew.engines:  # else another of its name has come already
            self.crew.remove(engine)
        await engine.replica.stop()

    def lose(self, engine: Engine, error: FleetError) -> None:
        """Somebody has found that the engine is not to be used any more: as if it had failed by itself."""
        self._lose(engine, error)

    async def ask_one(self, engine: Engine, token_ids: Sequence[int], *, name: str, deadline_s: float) -> EngineReply:
        """How likely that engine says each of `token_ids` is (see `score`). Raises FleetError, SampleError, DeadlineExceeded."""
        request = EngineRequest(next(self._ids), list(token_ids), Sampling(), name, 0)
        p = Pending(request, asyncio.get_running_loop().create_future())
        self._put(p, engine)
        try:
            async with asyncio.timeout(deadline_s):
                reply = await p.future
        except TimeoutError:
            raise DeadlineExceeded(engine.replica.name, "hung", f"{name} was not answered within {deadline_s:g} s") from None
        finally:
            self._drop(p)
        if reply.error is not None:
            raise SampleError(reply.error)
        if p.engine is not engine:
            raise PeerDied(engine.replica.name, "died", f"it failed under {name}")
        return reply

    async def _emptied(self, engine: Engine, within_s: float, look_s: float = 0.05) -> None:
        end = asyncio.get_running_loop().time() + within_s
        while engine.pending and engine.dead is None and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(look_s)

    def _hand_over(self, engine: Engine, some: Sequence[Pending]) -> None:
        """To other engines, which is no failure of this one."""
        for p in some:
            if p.request in engine.outbox:
                engine.outbox.remove(p.request)
            engine.pending.pop(p.request.id, None)
            p.elsewhere()
            self._place(p)

    async def update_weights(
        self, staged: dict[str, Staged], version: PolicyVersion, *, deadline_s: float = 60.0
    ) -> UpdateReport:
        """Commits `version`, staged on each host by name, on all engines at once.

        An engine that fails gets no samples until a later commit succeeds; the others go on. Raises TransferError
        when no engine took it; where all are dead and others are expected, it is for those.
        """
        living = self.crew.living
        self.turns += 1
        try:
            reports = await asyncio.gather(*(self._commit(e, staged.get(e.replica.host.name), deadline_s) for e in living))
        finally:
            self.turns += 1
        report = UpdateReport(version, {e.replica.name: r for e, r in zip(living, reports, strict=True)})
        if not any(r.ok for r in reports) and not (self.expects and not self.crew.living):
            causes = "; ".join(f"{name}: {why}" for name, why in report.failed.items()) or str(self._nobody())
            raise TransferError(f"no engine took version {version}: {causes}")
        self.version = version
        self.crew.muster()
        self._fill()
        return report

    async def _commit(self, engine: Engine, staged: Staged | None, deadline_s: float) -> CommitReport:
        name = engine.replica.name
        if staged is None:
            message = f"nothing was staged on its host {engine.replica.host.name}"
            report = CommitReport(ok=False, state=engine.stats.state, version=engine.stats.version, message=message)
        else:
            try:
                within = deadline_s + SILENT_S
                report = decode_report(
                    await engine.replica.call_one("commit", encode(staged), deadline_s, deadline_s=within)
                )
            except Exception as e:
                # what it serves now is unknown, so it must not serve
                self._lose(engine, as_fleet_error(engine, e))
                return CommitReport(ok=False, state="dead", version=engine.stats.version, message=str(e))
        engine.stats.version, engine.stats.state = report.version, report.state
        if report.ok:
            engine.stale = None
            self.crew.changed(engine)
        elif report.state == "dead":
            self._lose(engine, PeerDied(name, "died", report.message))
        else:
            engine.stale = report.message
        return report

    async def checksums(self, *, deadline_s: float = 60.0) -> dict[str, dict[str, str]]:
        """SGLang's checksum of the live parameters, by engine and rank."""
        living = self.crew.living
        sums = await asyncio.gather(*(e.replica.call_one("checksum", deadline_s=deadline_s) for e in living))
        return {e.replica.name: s for e, s in zip(living, sums, strict=True)}

    # ---- looking

    def versions(self) -> dict[str, PolicyVersion]:
        """What each living engine serves."""
        return {e.replica.name: e.stats.version for e in self.crew.living}

    def stats(self) -> dict[str, EngineStats]:
        """The last each engine said of itself, the dead ones too."""
        return {e.replica.name: e.stats for e in self.crew}

    @property
    def load(self) -> dict[str, int]:
        """Samples in flight on each engine, and those that wait here under ""."""
        return {e.replica.name: len(e.pending) for e in self.crew} | {"": len(self._waiting)}

    @property
    def tokens(self) -> int:
        """Tokens sampled by all engines since they started."""
        return self.crew.tokens

    @property
    def kv(self) -> dict[str, Any]:
        """Since the router began: `Crew.prefilled`; samples that went to their prefix, and past it to less busy engines."""
        return self.crew.prefilled() | {"prefix_hits": self._prefixes.hits, "prefix_passed": self._prefixes.passed}
