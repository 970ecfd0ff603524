"""How a version comes from the trainer to every engine: the plan, the way to each host, and one update from end to end.

The engines say how their parameters lie in memory (`sglang_hooks.layout`), the trainer's ranks plan for that once, and
every version is then packed once, straight into what the engines copy from. Engines whose loader does more than copy
get whole tensors by name instead, as they did before a plan existed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from milkweed.config.mesh import TransferConfig
from milkweed.errors import FleetError, MilkweedError, RemoteError, TransferError
from milkweed.transfer.manifest import Grant, Manifest, Staged
from milkweed.transfer.plan import EngineLayout, check_complete
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.fleet import Replica
    from milkweed.rollout import Router
    from milkweed.rollout.protocol import EngineStats
    from milkweed.rollout.records import UpdateReport
    from milkweed.training import Trainer

Way = Literal["shm", "nixl", "message", "relay"]
GRACE_S = 10.0
NEWCOMERS = "engines to come"
"""Holds the version that is served in each host's shared memory, so that a new engine gets it at once."""
FLOOR_GB_S = 0.2
_log = logging.getLogger(__name__)


@dataclass
class _Host:
    """One host with engines: its puller, the way weights get there, and the slot granted for the next version."""

    puller: Replica
    way: Way = "nixl"
    grant: Grant | None = None
    why: str = ""

    @property
    def name(self) -> str:
        return self.puller.host.name


class WeightPlane:
    """Updates the engines of `rollout` from `trainer`. `engines` gives the rollout replicas that there are now."""

    def __init__(
        self, trainer: Trainer, rollout: Router, pullers: Iterable[Replica], engines: Callable[[], Iterable[Replica]],
        config: TransferConfig,
    ) -> None:  # fmt: skip
        self.trainer, self.rollout, self.config = trainer, rollout, config
        self.hosts = [_Host(p) for p in pullers]
        self._engines = engines
        self._layout: EngineLayout | None = None
        self._digest = ""
        self._nbytes = 0
        self._known: dict[str, str] = {}
        self._planned = False
        self._measured = False
        self._warned: set[str] = set()
        self._settling: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self.served: Callable[[], None] = lambda: None
        """Called when a new engine made a version served outside an update."""
        self.report: UpdateReport | None = None
        """What the engines said of the last update."""

    @property
    def ways(self) -> dict[str, str]:
        """By host: the way that its weights take, and why."""
        if not self._digest:
            return {h.name: "whole tensors over NIXL" + (f" ({h.why})" if h.why else "") for h in self.hosts}
        return {h.name: h.way + (f" ({h.why})" if h.why else "") for h in self.hosts}

    # ---- the plan

    async def plan(self, deadline_s: float) -> None:
        """Ask the engines for their layout, let the trainer plan for it, find the way to each host. Done once; later
        calls only introduce engines that are new. Raises FleetError where the trainer or a puller is gone."""
        fresh = [r for r in self._engines() if r.failure is None and r.uid not in self._known]
        raws = await asyncio.gather(*(self._ask(r, deadline_s) for r in fresh))
        for replica, raw in zip(fresh, raws, strict=True):
            if isinstance(raw, bytes):
                layout = msgspec.msgpack.decode(raw, type=EngineLayout)
                self._known[replica.uid] = layout.digest()
                self._layout = self._layout or layout
            else:
                self._known[replica.uid] = ""
                self._say(f"{replica.name} takes whole tensors: {raw}")
        if self._planned:
            return
        if self._layout is None or set(self._known.values()) != {self._layout.digest()}:
            self._planned = True
            return
        self._layout.check()
        raw = msgspec.msgpack.encode(self._layout)
        boxes, self._nbytes = await self.trainer.adopt(raw, self.config.dtype)
        check_complete(self._layout, boxes)
        self._digest = self._layout.digest()
        for host in self.hosts:
            await self._choose(host, deadline_s)
        self._planned = True
        for host, way in self.ways.items():
            _log.info("weights reach %s by %s", host, way)

    async def _ask(self, replica: Replica, deadline_s: float) -> bytes | MilkweedError:
        try:
            return await replica.call_one("layout", deadline_s, deadline_s=deadline_s + GRACE_S)
        except MilkweedError as error:
            return error.__cause__ if isinstance(error.__cause__, MilkweedError) else error

    async def _choose(self, host: _Host, deadline_s: float) -> None:
        wanted = self.config.transport
        if wanted in ("auto", "shm"):
            await self._grant(host, deadline_s)
            if host.grant is not None and await self.trainer.reaches(host.grant):
                host.way, host.why = "shm", ""
                return
            if wanted == "shm":
                raise TransferError(f'{host.name} shares no memory with the trainer; set transfer.transport to "auto"')
            if host.grant is not None:
                await host.puller.call_one("revoke", deadline_s=deadline_s)
                host.grant = None
        host.way = "message" if wanted == "message" else "nixl"
        if self.config.relay and host.way == "nixl" and host is not self.hosts[0]:
            host.way = "relay"

    async def _grant(self, host: _Host, deadline_s: float) -> None:
        try:
            host.grant = await host.puller.call_one(
                "grant", self._nbytes, f"{self._digest} {self.config.dtype}", deadline_s=deadline_s
            )
        except FleetError as error:
            host.grant = None
            self._say(f"{host.name} has no slot to fill: {error}")

    def _say(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    # ---- one update

    async def update(self, offered: Callable[[], None], deadline_s: float) -> dict[str, float]:
        """Give every engine the trainer's present weights. `offered` is called as soon as the trainer may go on. One that
        comes meanwhile gets them after.

        Returns the seconds of each part, of the whole until the engines served (`update`), and `bytes`, `moved`.
        Raises TransferError where no engine got them; one that failed alone serves nothing until a later update.
        """
        async with self._turn:
            return await self._update(offered, deadline_s)

    async def _update(self, offered: Callable[[], None], deadline_s: float) -> dict[str, float]:
        try:
            await self.settled()
            await self._pullers(deadline_s)
            await self.plan(deadline_s)
        except BaseException:
            offered()
            raise
        began = time.perf_counter()
        releases: list[asyncio.Future[None]] = []
        failures: list[str] = []
        staged: dict[str, Staged] = {}
        after: list[Awaitable[Any]] = []
        publish_s, nbytes = 0.0, 0
        try:
            try:
                living = [h for h in self.hosts if h.puller.failure is None]
                shared = [h for h in living if self._digest and h.way == "shm"]
                version = self.trainer.version
                if shared:
                    version, nbytes = await self._place(shared, staged, after, failures, deadline_s)
                    publish_s += self.trainer.publish_s
                manifest = None
                readers = [h for h in living if h not in shared]
                if readers:
                    manifest = await self._offer([h.puller.name for h in readers if h.way != "relay"])
                    publish_s += self.trainer.publish_s
                    version, nbytes = manifest.version, manifest.nbytes
            finally:
                offered()
            if manifest is not None:
                await self._fetch(readers, manifest, staged, failures, releases, deadline_s)
            if not staged:
                raise TransferError(f"no host got version {version}: {'; '.join(failures)}")
            done = time.perf_counter()
            try:
                commit = self.rollout.update_weights(staged, version, deadline_s=deadline_s)
                report, *_ = await asyncio.gather(commit, *after)
                served, self.report = time.perf_counter(), report
            finally:
                self._settling = asyncio.create_task(self._hold_what_is_served(deadline_s))
        finally:
            await asyncio.gather(*releases)
        pull_s = max(s.seconds for s in staged.values())
        self._watch(nbytes, done - began)
        return {
            "publish": publish_s, "pull": pull_s, "commit": report.seconds, "update": served - began,
            "bytes": float(nbytes),
        }  # fmt: skip

    async def _place(
        self, hosts: list[_Host], staged: dict[str, Staged], after: list[Awaitable[Any]], failures: list[str], deadline_s: float
    ) -> tuple[PolicyVersion, int]:
        """The trainer's ranks fill the hosts' slots themselves."""
        for host in hosts:
            if host.grant is None:
                await self._grant(host, deadline_s)
            if host.grant is None:
                failures.append(f"{host.puller.name} has no slot to fill")
        ready = [h for h in hosts if h.grant is not None]
        if not ready:
            return self.trainer.version, 0
        grants = [h.grant for h in ready if h.grant is not None]
        try:
            version, nbytes = await self.trainer.place(grants, self._digest, self.config.dtype, deadline_s=deadline_s)
        except BaseException:
            for host in ready:  # nobody knows who still writes
                host.grant = None
                await self._try(host, "revoke", deadline_s=deadline_s)
            raise
        for host, grant in zip(ready, grants, strict=True):
            host.grant = None
            staged[host.name] = done = Staged(
                version=version, path=grant.path, offset=grant.offset, nbytes=grant.nbytes, digest=0, tensors=[],
                layout=self._digest, dtype=self.config.dtype, stamp=grant.stamp,
            )  # fmt: skip
            after.append(self._try(host, "stage", done, self._engines_of(host), deadline_s=deadline_s))
        return version, nbytes

    async def _offer(self, readers: list[str]) -> Manifest:
        if not self._digest:
            return await self.trainer.publish(readers)
        return await self.trainer.publish_packed(readers, self._digest, self.config.dtype)

    async def _fetch(
        self, hosts: list[_Host], manifest: Manifest, staged: dict[str, Staged], failures: list[str],
        releases: list[asyncio.Future[None]], deadline_s: float,
    ) -> None:  # fmt: skip
        """The hosts read what the trainer offers, or what a host before them has read."""

        async def pull(host: _Host, what: Manifest) -> None:
            try:
                if host.way == "message" and self._digest:
                    staged[host.name] = await self._send_messages(host, what, deadline_s)
                else:
                    staged[host.name] = await host.puller.call_one(
                        "pull", what, deadline_s, self._engines_of(host), deadline_s=deadline_s + GRACE_S
                    )
            except MilkweedError as error:
                failures.append(f"{host.puller.name}: {error}")
            finally:  # not waited for here: a trainer at its next step answers only after it
                if what is manifest:
                    releases.append(asyncio.ensure_future(self.trainer.release(host.puller.name, manifest.version)))

        first = [h for h in hosts if h.way != "relay" or not self._digest]
        await asyncio.gather(*(pull(h, manifest) for h in first))
        waiting = [h for h in hosts if h not in first]
        have = [h for h in first if h.name in staged]
        while waiting and have:  # every host that has it serves one more: doubles each round
            pairs = list(zip(have, waiting))
            await asyncio.gather(*(self._relay(source, host, manifest.version, pull, deadline_s) for source, host in pairs))
            waiting = waiting[len(pairs) :]
            have += [h for _, h in pairs if h.name in staged]

    async def _relay(self, source: _Host, host: _Host, version: PolicyVersion, pull: Any, deadline_s: float) -> None:
        reader = f"relay to {host.puller.name}"
        try:
            offer = await source.puller.call_one("offer", version, reader, deadline_s=deadline_s)
            await pull(host, Manifest(version, [offer]))
        finally:
            await source.puller.call_one("release", reader, version, deadline_s=deadline_s)

    async def _send_messages(self, host: _Host, manifest: Manifest, deadline_s: float) -> Staged:
        """Chunk by chunk through the controller: slow, and all that is left where nothing else connects."""
        end = time.monotonic() + deadline_s
        began = time.perf_counter()
        wanted = await host.puller.call_one("expect", manifest, deadline_s=deadline_s)
        for rank, number in wanted:
            left = end - time.monotonic()
            if left <= 0:
                raise TransferError(f"version {manifest.version} was not sent to {host.name} within {deadline_s:g} s")
            data = await self.trainer.chunk(manifest.ranks[rank].rank, manifest.version, number)
            await host.puller.call_one("receive", rank, number, data, deadline_s=left)
        done = await host.puller.call_one("complete", self._engines_of(host), deadline_s=deadline_s)
        return msgspec.structs.replace(done, seconds=time.perf_counter() - began)

    async def settled(self) -> None:
        """Waits until the hosts have made ready for the next version, which they do beside the loop once the engines
        serve. A puller that was lost meanwhile is said; the next update does without it."""
        settling, self._settling = self._settling, None
        if settling is not None:
            try:
                await settling
            except FleetError as error:
                self._say(f"a host is not ready for the next version: {error}")

    async def close(self) -> None:
        """Stops what goes on beside the loop."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)

    async def _hold_what_is_served(self, deadline_s: float) -> None:
        """Each engine keeps its hold on the version it serves, to roll back to, and on no other; the free slot is
        granted for the next version already, off the way of it."""
        served = {**self.rollout.versions(), NEWCOMERS: self.rollout.version}
        living = [h for h in self.hosts if h.puller.failure is None]
        await asyncio.gather(*(self._try(h, "keep_only", served, deadline_s=deadline_s) for h in living))
        open_ = [h for h in living if h.way == "shm" and h.grant is None and self._digest]
        await asyncio.gather(*(self._grant(h, deadline_s) for h in open_))

    def _engines_of(self, host: _Host) -> list[str]:
        return [NEWCOMERS, *(r.name for r in self._engines() if r.host is host.puller.host)]

    async def _try(self, host: _Host, endpoint: str, *args: Any, deadline_s: float) -> None:
        """Call the host's puller; where that fails the puller is at fault, not the version: its supervisor mends it."""
        try:
            await host.puller.call_one(endpoint, *args, deadline_s=deadline_s)
        except FleetError as error:
            self._say(f"{host.name}: {error}")

    # ---- what is new

    async def welcome(self, replica: Replica, stats: EngineStats, deadline_s: float) -> None:
        """Bring a new engine to the version that is served, and let it serve. Raises FleetError or TransferError where
        it did not get there."""
        async with self._turn:
            await self.settled()
            self.rollout.admit(replica, stats)
            if stats.version == self.rollout.version:
                await self.rollout.join(replica.name, None, deadline_s=deadline_s)
                return
            await self.plan(deadline_s)
            if self._digest and self._known.get(replica.uid) != self._digest:
                raise TransferError(f"{replica.name} lays its parameters out in another way than the engines before it")
            staged = None
            host = next((h for h in self.hosts if h.puller.host is replica.host and h.puller.failure is None), None)
            if host is not None:
                try:
                    staged = await host.puller.call_one("hold", replica.name, self.rollout.version, deadline_s=deadline_s)
                except RemoteError:
                    pass  # no longer there: it is sent once more
            if staged is None:
                await self._update(lambda: None, deadline_s)
                self.served()
            await self.rollout.join(replica.name, staged, deadline_s=deadline_s)

    async def replace_puller(self, puller: Replica, deadline_s: float) -> None:
        """A new puller on a host whose last one failed."""
        async with self._turn:
            host = next(h for h in self.hosts if h.puller.name == puller.name)
            host.puller, host.grant = puller, None
            if self._digest:
                await self._choose(host, deadline_s)

    async def _pullers(self, deadline_s: float) -> None:
        """Waits, with no puller alive, for the supervisor to bring one. Raises TransferError at the deadline."""
        end = time.monotonic() + deadline_s
        while all(h.puller.failure is not None for h in self.hosts):
            if time.monotonic() > end:
                raise TransferError(f"no host has a puller: {'; '.join(str(h.puller.failure) for h in self.hosts)}")
            self._turn.release()  # `replace_puller` takes it
            try:
                await asyncio.sleep(0.1)
            finally:
                await self._turn.acquire()

    def _watch(self, nbytes: int, seconds: float) -> None:
        speed = nbytes / max(seconds, 1e-9) / 1e9
        _log.log(logging.DEBUG if self._measured else logging.INFO, "%.1f MB reached the hosts in %.4f s, %.2f GB/s", nbytes / 1e6, seconds, speed)
        self._measured = True
        if nbytes > 64 << 20 and speed < FLOOR_GB_S:
            ways = ", ".join(f"{h} by {w}" for h, w in self.ways.items())
            self._say(f"weights travel at {speed:.2f} GB/s only, below {FLOOR_GB_S:g} ({ways}): `milkweed doctor` measures why")
