"""The host's side: read a version one-sided from every trainer rank, verify it, stage it in shared memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer import layout
from milkweed.transfer.arrival import Arrival
from milkweed.transfer.attempt import Attempt, in_thread
from milkweed.transfer.inbox import Inbox
from milkweed.transfer.manifest import Grant, Manifest, RankManifest, Staged, Target
from milkweed.transfer.reading import read_packed, read_tensors
from milkweed.transfer.relay import Relay
from milkweed.transfer.session import Session
from milkweed.transfer.slots import Slot, Slots
from milkweed.types import PolicyVersion

GRACE_S = 1.0
"""How long after its deadline a pull may take to notice; then its thread is abandoned."""
QUARANTINE = 4
"""Failed sessions kept when they do not stop; with more, something is wrong that only a new process mends."""


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
        attempt = Attempt(manifest, time.monotonic() + deadline_s, deadline_s)
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

    async def _attempt(self, attempt: Attempt) -> Staged:
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
        work = in_thread(lambda: self._pull(attempt), f"{self.name}-pull")
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

    def _give_up(self, attempt: Attempt, work: asyncio.Future[Staged]) -> None:
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

    def _pull(self, attempt: Attempt) -> Staged:
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
                read_tensors(attempt, session, starts)
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

    def _pull_packed(self, attempt: Attempt, target: Target) -> Staged:
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
                read_packed(attempt, session, arrival)
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

    def _fail_session(self, attempt: Attempt, session: Session) -> None:
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


def _identity(manifest: Manifest) -> bytes:
    """What tells two manifests of one version apart."""
    return b"".join(r.digest for r in manifest.ranks)
