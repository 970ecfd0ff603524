"""The host's side: read a version one-sided from every trainer rank, verify it, stage full tensors in shared memory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import xxhash
from monarch.actor import Actor, concurrent_endpoint

from milkweed.errors import TransferError
from milkweed.transfer import layout
from milkweed.transfer.arrival import Arrival
from milkweed.transfer.inbox import Inbox
from milkweed.transfer.manifest import Chunk, Grant, Manifest, RankManifest, Staged, Target
from milkweed.transfer.nixl import Read
from milkweed.transfer.relay import Relay
from milkweed.transfer.session import Session
from milkweed.transfer.slots import Slot, Slots
from milkweed.types import PolicyVersion

T = TypeVar("T")
_log = logging.getLogger(__name__)

WINDOW = 4
"""READs posted ahead: over a network one alone would wait a round trip for each chunk."""
GRACE_S = 1.0
"""How long after its deadline a pull may take to notice; then its thread is abandoned."""
QUARANTINE = 4
"""Failed sessions kept when they do not stop; with more, something is wrong that only a new process mends."""


class _Attempt:
    """One pull: what is asked, until when, and how far it is. `lock` orders its steps against being given up."""

    def __init__(self, manifest: Manifest, deadline: float, deadline_s: float) -> None:
        self.manifest, self.deadline, self.deadline_s = manifest, deadline, deadline_s
        self.lock = threading.Lock()
        self.given_up = False
        self.reading = False  # inside NIXL, which may never return; all else is local work that ends by itself
        self.slot: Slot | None = None

    def step(self, reading: bool) -> None:
        """Enter or leave NIXL. Raises TransferError if the pull was given up meanwhile."""
        with self.lock:
            self.check_given_up()
            self.reading = reading

    def place(self, rank: RankManifest, chunk: Chunk | None = None) -> str:
        """Where an error happened."""
        at = f"version {self.manifest.version} from {rank.peer}"
        if chunk is None:
            return at
        return f"{at}, bytes {chunk.offset}:{chunk.offset + chunk.nbytes} ({rank.tensors_in(chunk)})"

    def check_time(self, rank: RankManifest, chunk: Chunk) -> None:
        """Raises TransferError past the deadline, naming who was being waited for."""
        self.check_given_up()
        if time.monotonic() > self.deadline:
            raise TransferError(
                f"{self.place(rank, chunk)}: no answer within {self.deadline_s:g} s; "
                "the rank is hung, stopped or unreachable"
            )

    def check_given_up(self) -> None:
        if self.given_up:
            raise TransferError(f"the pull of version {self.manifest.version} was given up")


class Puller:
    """Reads versions of the weights for one host.

    Files in /dev/shm begin with `mw-<token>-<name>`. Pulls run one after another, each in a thread of its own, so the
    event loop goes on.

    Args:
        token: the fleet's token; whoever ends the fleet removes `/dev/shm/mw-<token>-*`.
        name: the puller's name, one of a kind on its host.
    """

    def __init__(self, token: str, name: str = "puller") -> None:
        self.name = name
        self._slots = Slots(f"mw-{token}-{name}")
        self._session: Session | None = None
        self._quarantine: list[Session] = []
        self._unfinished: asyncio.Future[Staged] | None = None
        self._turn = asyncio.Lock()
        self._last: dict[str, float] = {}
        self._granted: Slot | None = None
        self._inbox: Inbox | None = None
        self._relay: Relay | None = None
        self._closed = False

    async def pull(self, manifest: Manifest, deadline_s: float, holders: Sequence[str] = ()) -> Staged:
        """The version as full tensors in shared memory, held for `holders` from the start.

        Raises TransferError within `deadline_s` (and at most `GRACE_S`) naming the peer and the chunk or tensor: a rank
        is dead, hung or slow, bytes differ from their digest, the manifest was altered, shards leave gaps or overlap,
        both slots are held. What was staged and held before is then as it was. A version that is already here is not
        read again. The first pull allocates three times the model (the buffer and two slots): give it a minute.
        """
        attempt = _Attempt(manifest, time.monotonic() + deadline_s, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise TransferError(
                f"{self.name}: another pull ran during all the {deadline_s:g} s given to version {manifest.version}"
            ) from error
        try:
            if self._closed:
                raise TransferError(f"{self.name} is closed")
            staged = self._ready(manifest)
            if staged is None:
                staged = await self._attempt(attempt)
            for holder in holders:
                self._slots.hold(holder, staged.version)
            return staged
        finally:
            self._turn.release()

    def grant(self, nbytes: int, layout: str) -> Grant:
        """A slot for trainer ranks of this host to fill themselves. It is nobody else's until it is staged or revoked.
        Raises TransferError if both slots are held. An earlier grant that is still open ends."""
        if self._closed:
            raise TransferError(f"{self.name} is closed")
        self.revoke()
        slot = self._slots.claim(nbytes)
        self._slots.begin(slot, layout)
        self._granted = slot
        return Grant(str(slot.file.path), slot.offset, nbytes, int(slot.stamp[0]))

    def stage(self, staged: Staged, holders: Sequence[str] = ()) -> None:
        """What was granted now holds the whole of a version. Raises TransferError if the grant has ended."""
        slot, self._granted = self._granted, None
        if slot is None or int(slot.stamp[0]) != staged.stamp:
            self._granted = slot
            raise TransferError(f"{self.name}: version {staged.version} was put in a slot whose grant has ended")
        self._slots.stage(slot, staged, b"")
        for holder in holders:
            self._slots.hold(holder, staged.version)

    def revoke(self) -> None:
        """End a grant. Somebody may still write into the slot, so it is never used again."""
        if self._granted is not None:
            self._granted.new_stamp()
            self._slots.spoil(self._granted)
            self._granted = None

    def expect(self, manifest: Manifest) -> list[tuple[int, int]]:
        """Begin to take a packed version as messages; which chunks `(rank, chunk)` are wanted. An earlier one that did
        not become whole is dropped."""
        self._drop_inbox()
        self._inbox = Inbox(self._slots, manifest)
        return self._inbox.wanted

    def receive(self, rank: int, chunk: int, data: bytes) -> None:
        """One chunk. Raises TransferError if it differs from its digest."""
        if self._inbox is None:
            raise TransferError(f"{self.name} expects no version")
        self._inbox.receive(rank, chunk, data)

    def complete(self, holders: Sequence[str] = ()) -> Staged:
        """All chunks are there. Raises TransferError if not."""
        if self._inbox is None:
            raise TransferError(f"{self.name} expects no version")
        staged = self._inbox.complete(_identity(self._inbox.manifest))
        self._inbox = None
        for holder in holders:
            self._slots.hold(holder, staged.version)
        return staged

    def _drop_inbox(self) -> None:
        if self._inbox is not None:
            self._inbox.drop()
            self._inbox = None

    def offer(self, version: PolicyVersion, reader: str) -> RankManifest:
        """What is staged here, for another host's puller to read; held for `reader` until released. Raises
        TransferError if the version is not here, or was not packed for engines."""
        staged = self._slots.hold(reader, version)
        slot = self._slots.find(version)
        if not staged.layout or slot is None:
            raise TransferError(f"{self.name} has version {version} as whole tensors, which are not handed on")
        self._relay = self._relay or Relay(self.name)
        return self._relay.offer(slot, staged)

    def hold(self, holder: str, version: PolicyVersion) -> Staged:
        """Keep a staged version from being overwritten, for an engine that serves it or is about to."""
        return self._slots.hold(holder, version)

    def release(self, holder: str, version: PolicyVersion | None = None) -> None:
        """End the holder's hold on `version`, or all its holds (None: it is dead)."""
        self._slots.release(holder, version)

    def keep_only(self, served: dict[str, PolicyVersion]) -> None:
        """Holders keep their hold on the version that `served` names for them; every other hold ends, also those of
        holders that it does not name: they are gone. If both slots stay held, holds on the older version end too, so
        that an engine which missed an update keeps nobody from the next. To be called when no commit is running."""
        self._slots.keep_only(served)

    def status(self) -> dict[str, Any]:
        """Slots with versions and holders, the last pull's bytes, seconds of its parts and GB/s, and how many failed
        sessions are not stopped yet."""
        return {"slots": self._slots.status(), "last": dict(self._last), "quarantined": len(self._quarantine)}

    def close(self) -> None:
        """Stop the agent (waiting at most `GRACE_S` for it) and remove the shared-memory files; engines keep what they
        have mapped."""
        self._closed = True
        if self._session is not None:
            self._drop_session(self._session)
        if self._relay is not None:
            self._relay.close()
        self._slots.close()
        patience = time.monotonic() + GRACE_S
        while self._quarantine and time.monotonic() < patience:
            time.sleep(0.01)

    def _ready(self, manifest: Manifest) -> Staged | None:
        slot = self._slots.find(manifest.version)
        return slot.staged if slot is not None and slot.source == _identity(manifest) else None

    async def _attempt(self, attempt: _Attempt) -> Staged:
        if self._unfinished is not None:  # given up during local work, such as touching fresh memory, which goes on
            await asyncio.wait({self._unfinished}, timeout=max(0.0, attempt.deadline - time.monotonic()))
            if not self._unfinished.done():
                raise TransferError(
                    f"{self.name}: an earlier pull still allocates or assembles after {attempt.deadline_s:g} s"
                )
            self._unfinished = None
            staged = self._ready(attempt.manifest)
            if staged is not None:
                return staged
        work = _in_thread(lambda: self._pull(attempt), f"{self.name}-pull")
        try:
            await asyncio.wait({work}, timeout=max(0.0, attempt.deadline - time.monotonic()) + GRACE_S)
        except asyncio.CancelledError:
            self._give_up(attempt, work)
            raise
        if not work.done():
            self._give_up(attempt, work)
            ranks = ", ".join(r.peer for r in attempt.manifest.ranks)
            raise TransferError(
                f"version {attempt.manifest.version}: not read and staged within {attempt.deadline_s:g} s from {ranks}"
            )
        return work.result()

    def _give_up(self, attempt: _Attempt, work: asyncio.Future[Staged]) -> None:
        """Nobody waits for this pull any more. Inside NIXL it is left to itself with its session, which is not used
        again; otherwise its local work ends by itself and the next pull waits for that, keeping what it allocated."""
        with attempt.lock:
            attempt.given_up = True
            if attempt.reading:
                if self._session is not None:
                    self._quarantine.append(self._session)
                    self._session = None
                if attempt.slot is not None and attempt.manifest.ranks[0].target is not None:
                    self._slots.spoil(attempt.slot)
                elif attempt.slot is not None:
                    self._slots.unclaim(attempt.slot)
            else:
                self._unfinished = work

    def _pull(self, attempt: _Attempt) -> Staged:
        """The whole pull, in a thread of its own."""
        began = time.perf_counter()
        manifest = attempt.manifest
        manifest.check()
        if manifest.ranks[0].target is not None:
            return self._pull_packed(attempt, manifest.ranks[0].target)
        planned = layout.plan(manifest)
        starts = np.cumsum([0] + [layout.aligned(r.nbytes, 4096) for r in manifest.ranks]).tolist()
        slot = attempt.slot = self._slots.claim(planned.nbytes)
        try:
            session = self._open_session(starts[-1])
            ready = time.perf_counter()
            attempt.step(reading=True)
            try:
                self._read(attempt, session, starts)
                attempt.step(reading=False)
            except BaseException:
                self._fail_session(attempt, session)
                raise
            arrived = time.perf_counter()
            self._slots.begin(slot)
            sources = [session.arena.bytes[at : at + r.nbytes] for at, r in zip(starts, manifest.ranks, strict=False)]
            layout.assemble(planned, sources, slot.bytes)
            digest = xxhash.xxh3_64_intdigest(slot.bytes[: planned.nbytes])
            staged = Staged(
                version=manifest.version, path=str(slot.file.path), offset=slot.offset, nbytes=planned.nbytes,
                digest=digest, tensors=planned.tensors, seconds=time.perf_counter() - began,
            )  # fmt: skip
            self._slots.stage(slot, staged, _identity(manifest))
        finally:
            with attempt.lock:
                if not (attempt.given_up and attempt.reading):  # else unclaimed already, and perhaps another's by now
                    self._slots.unclaim(slot)
        ended = time.perf_counter()
        self._last = {
            "nbytes": manifest.nbytes, "prepare_s": ready - began, "read_s": arrived - ready,
            "assemble_s": ended - arrived, "read_gb_s": manifest.nbytes / max(arrived - ready, 1e-9) / 1e9,
        }  # fmt: skip
        return staged

    def _pull_packed(self, attempt: _Attempt, target: Target) -> Staged:
        """As `_pull`, of what is packed for the engines: it lands in the slot itself, and the bytes that this host has
        already are not read."""
        began = time.perf_counter()
        manifest = attempt.manifest
        slot = attempt.slot = self._slots.claim(target.nbytes)
        try:
            held, other = dict(slot.contents), self._slots.newest(slot)
            if other is not None and (other.staged is None or other.staged.layout != target.layout):
                other = None
            arrival = Arrival(manifest, slot, other, held)
            session = self._open_session(arrival.scratch_bytes)
            session.admit(slot.file)
            arrival.plan(session.arena.bytes)
            self._slots.begin(slot, f"{target.layout} {target.dtype}")
            ready = time.perf_counter()
            attempt.step(reading=True)
            try:
                self._read_posts(attempt, session, arrival)
                attempt.step(reading=False)
            except BaseException:
                self._slots.spoil(slot)  # bytes of an abandoned READ may still land in it
                self._fail_session(attempt, session)
                raise
            arrived = time.perf_counter()
            for part in (p for post in arrival.posts for p in post.parts if p.region.row_bytes):
                part.spread(slot.bytes)
            arrival.copy_unchanged()
            slot.contents = arrival.contents
            base, ranges = arrival.ranges() or (None, None)
            staged = Staged(
                version=manifest.version, path=str(slot.file.path), offset=slot.offset, nbytes=target.nbytes, digest=0,
                tensors=[], seconds=time.perf_counter() - began, layout=target.layout, dtype=target.dtype,
                stamp=int(slot.stamp[0]), base=base, ranges=ranges,
            )  # fmt: skip
            self._slots.stage(slot, staged, _identity(manifest))
        finally:
            with attempt.lock:
                if not (attempt.given_up and attempt.reading):
                    self._slots.unclaim(slot)
        self._last = {
            "nbytes": manifest.nbytes, "moved": arrival.moved, "prepare_s": ready - began, "read_s": arrived - ready,
            "assemble_s": time.perf_counter() - arrived, "read_gb_s": arrival.moved / max(arrived - ready, 1e-9) / 1e9,
        }  # fmt: skip
        return staged

    def _read_posts(self, attempt: _Attempt, session: Session, arrival: Arrival) -> None:
        ranks = attempt.manifest.ranks
        session.forget_others({r.agent for r in ranks})
        work: deque[tuple[RankManifest, Sequence[tuple[Chunk, np.ndarray]], Read]] = deque()
        for rank in ranks:
            posts = [p for p in arrival.posts if p.rank is rank]
            if not posts:
                continue
            with _naming(attempt.place(rank)):
                reads = session.plan_into(rank, tuple(p.piece for p in posts), tuple(p.place for p in posts))
            work.extend((rank, [(a.chunk, a.memory) for a in p.parts], r) for p, r in zip(posts, reads, strict=True))
        self._complete(attempt, work)

    def _open_session(self, nbytes: int) -> Session:
        if self._session is not None and self._session.arena.nbytes < nbytes:
            self._drop_session(self._session)
        if self._session is None:
            if len(self._quarantine) > QUARANTINE:
                raise TransferError(
                    f"{self.name}: {len(self._quarantine)} failed NIXL sessions did not stop; start another puller"
                )
            self._session = Session(self.name, nbytes)
        return self._session

    def _read(self, attempt: _Attempt, session: Session, starts: list[int]) -> None:
        """Read every chunk of every rank into the session's buffer."""
        ranks = attempt.manifest.ranks
        session.forget_others({r.agent for r in ranks})
        work: deque[tuple[RankManifest, Sequence[tuple[Chunk, np.ndarray]], Read]] = deque()
        for rank, at in zip(ranks, starts, strict=False):
            with _naming(attempt.place(rank)):
                reads = session.plan(rank, at)
            for chunk, read in zip(rank.chunks, reads, strict=True):
                here = session.arena.bytes[at + chunk.offset : at + chunk.offset + chunk.nbytes]
                work.append((rank, [(chunk, here)], read))
        self._complete(attempt, work)

    def _complete(
        self, attempt: _Attempt, work: deque[tuple[RankManifest, Sequence[tuple[Chunk, np.ndarray]], Read]]
    ) -> None:
        """Do every READ, `WINDOW` posted at a time, verifying in a second thread what has arrived."""
        posted: deque[tuple[RankManifest, Sequence[tuple[Chunk, np.ndarray]], Read, bool]] = deque()
        checks: list[tuple[RankManifest, Chunk, Future[int]]] = []
        with ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-verify") as verifier:
            while work or posted:
                while work and len(posted) < WINDOW:
                    rank, parts, read = work.popleft()
                    attempt.check_time(rank, parts[0][0])
                    with _naming(attempt.place(rank, parts[0][0])):
                        posted.append((rank, parts, read, read.start()))
                rank, parts, read, done = posted.popleft()
                began = time.monotonic()
                with _naming(attempt.place(rank, parts[0][0])):
                    while not done:
                        # polling is what moves the bytes of a network transport: without rest first, then with
                        time.sleep(0 if time.monotonic() - began < 0.005 else 2e-4)
                        done = read.done()
                        if not done and time.monotonic() > attempt.deadline:
                            break
                if not done:
                    attempt.check_time(rank, parts[0][0])
                checks += [(rank, c, verifier.submit(xxhash.xxh3_64_intdigest, here)) for c, here in parts]
            for rank, chunk, digest in checks:
                if digest.result() != chunk.digest:
                    raise TransferError(
                        f"{attempt.place(rank, chunk)}: bytes differ from their digest; the slot was overwritten "
                        "while it was read (a lease ended too soon) or they were altered on the way"
                    )

    def _fail_session(self, attempt: _Attempt, session: Session) -> None:
        with attempt.lock:
            if not attempt.given_up:
                self._drop_session(session)
                return
        self._bury(session)  # in quarantine already; this thread has come back, so it can be stopped

    def _drop_session(self, session: Session) -> None:
        self._session = None
        self._quarantine.append(session)
        threading.Thread(target=self._bury, args=(session,), name=f"{self.name}-quarantine", daemon=True).start()

    def _bury(self, session: Session) -> None:
        """Stop the session's agent; its buffer is freed only once that has returned."""
        session.close()
        self._quarantine.remove(session)


class PullerActor(Actor):
    """A `Puller` in a Monarch process of its own; its endpoints overlap, so holds and status answer during a pull."""

    def __init__(self, token: str, name: str = "puller") -> None:
        self._puller = Puller(token, name)

    @concurrent_endpoint
    async def pull(self, manifest: Manifest, deadline_s: float, holders: Sequence[str] = ()) -> Staged:
        try:
            return await self._puller.pull(manifest, deadline_s, holders)
        except asyncio.CancelledError as error:  # escaping an endpoint it would silently kill the actor
            raise TransferError(f"the pull of version {manifest.version} was cancelled") from error

    @concurrent_endpoint
    async def grant(self, nbytes: int, layout: str) -> Grant:
        return self._puller.grant(nbytes, layout)

    @concurrent_endpoint
    async def stage(self, staged: Staged, holders: Sequence[str] = ()) -> None:
        self._puller.stage(staged, holders)

    @concurrent_endpoint
    async def revoke(self) -> None:
        self._puller.revoke()

    @concurrent_endpoint
    async def expect(self, manifest: Manifest) -> list[tuple[int, int]]:
        return self._puller.expect(manifest)

    @concurrent_endpoint
    async def receive(self, rank: int, chunk: int, data: bytes) -> None:
        self._puller.receive(rank, chunk, data)

    @concurrent_endpoint
    async def complete(self, holders: Sequence[str] = ()) -> Staged:
        return self._puller.complete(holders)

    @concurrent_endpoint
    async def offer(self, version: PolicyVersion, reader: str) -> RankManifest:
        return await asyncio.to_thread(self._puller.offer, version, reader)

    @concurrent_endpoint
    async def hold(self, holder: str, version: PolicyVersion) -> Staged:
        return self._puller.hold(holder, version)

    @concurrent_endpoint
    async def release(self, holder: str, version: PolicyVersion | None = None) -> None:
        self._puller.release(holder, version)

    @concurrent_endpoint
    async def keep_only(self, served: dict[str, PolicyVersion]) -> None:
        self._puller.keep_only(served)

    @concurrent_endpoint
    async def status(self) -> dict[str, Any]:
        return self._puller.status()

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self._puller.close)


class _naming:
    """Puts the place in front of a TransferError raised inside."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TransferError):
            raise TransferError(f"{self.place}: {error}") from error


def _identity(manifest: Manifest) -> bytes:
    """What tells two manifests of one version apart."""
    return b"".join(r.digest for r in manifest.ranks)


def _in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run in a daemon thread: unlike an executor's, one that never returns does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # given up: nobody will ask for it

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # handed to whoever awaits, whatever it is
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: nobody awaits any more
            _log.warning("%s ended after its event loop: %r", name, error or "done")

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
