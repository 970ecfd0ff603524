"""A version's bytes by one-sided READs, each verified while the next ones arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.arrival import Arrival
from milkweed.transfer.attempt import Attempt, naming
from milkweed.transfer.manifest import Chunk, RankManifest
from milkweed.transfer.nixl import Read
from milkweed.transfer.session import Session

WINDOW_BYTES, WINDOW = 16 << 20, 64
"""Bytes and READs posted ahead: over a network one alone would wait a round trip for each, and many at once arrive all
together at the end, with nothing to verify before."""
SPIN_S = 0.25
"""How long polls follow each other without rest since something arrived."""

Parts = Sequence[tuple[Chunk, np.ndarray]]
"""The chunks that one READ brings, and the memory that each lands in."""
_Work = deque[tuple[RankManifest, Parts, Read]]


def read_tensors(attempt: Attempt, session: Session, starts: Sequence[int]) -> None:
    """Read every chunk of every rank into the session's buffer, the rank's share from its start on.

    Raises TransferError, naming the rank and the place, if one does not answer by the deadline, or if bytes differ from
    their digest.
    """
    ranks = attempt.manifest.ranks
    session.forget_others({r.agent for r in ranks})
    work: _Work = deque()
    for rank, at in zip(ranks, starts, strict=False):
        with naming(attempt.place(rank)):
            reads = session.plan(rank, at)
        for chunk, read in zip(rank.chunks, reads, strict=True):
            here = session.arena.bytes[at + chunk.offset : at + chunk.offset + chunk.nbytes]
            work.append((rank, [(chunk, here)], read))
    _complete(attempt, work)


def read_packed(attempt: Attempt, session: Session, arrival: Arrival) -> None:
    """As `read_tensors`, all that `arrival` wants."""
    ranks = attempt.manifest.ranks
    session.forget_others({r.agent for r in ranks})
    work: _Work = deque()
    for rank in ranks:
        posts = [p for p in arrival.posts if p.rank is rank]
        if not posts:
            continue
        with naming(attempt.place(rank)):
            reads = session.plan_into(rank, tuple(p.piece for p in posts), tuple(p.place for p in posts))
        work.extend((rank, [(a.chunk, a.memory) for a in p.parts], r) for p, r in zip(posts, reads, strict=True))
    _complete(attempt, work)


def _complete(attempt: Attempt, work: _Work) -> None:
    """Do every READ, a window of them posted at a time, and verify what has arrived while the next ones do.

    A READ of a network transport arrives while it is polled for: the poller verifies between polls, for which a thread
    beside it would take the sender's core from it where there are few. One that blocks for the copy leaves the verifying
    to a second thread. What is left when nothing is under way any more is shared by both.
    """
    posted: deque[tuple[RankManifest, Parts, Read, bool]] = deque()
    ahead = 0
    checks = _Checks(attempt)
    with ThreadPoolExecutor(1, thread_name_prefix="mw-verify") as verifier:
        while work or posted:
            while work and len(posted) < WINDOW and (ahead < WINDOW_BYTES or not posted):
                rank, parts, read = work.popleft()
                ahead += _nbytes(parts)
                attempt.check_time(rank, parts[0][0])
                with naming(attempt.place(rank, parts[0][0])):
                    posted.append((rank, parts, read, read.start()))
            rank, parts, read, done = posted.popleft()
            ahead -= _nbytes(parts)
            blocks = done
            began = time.monotonic()
            with naming(attempt.place(rank, parts[0][0])):
                while not done:
                    # polling is what moves the bytes of a network transport; who rests has half the speed
                    if not checks.some(1):
                        time.sleep(0 if time.monotonic() - began < SPIN_S else 2e-4)
                    done = read.done()
                    if not done and time.monotonic() > attempt.deadline:
                        break
            if not done:
                attempt.check_time(rank, parts[0][0])
            checks.add(rank, parts)
            if blocks:
                verifier.submit(checks.some, len(parts))
        rest = verifier.submit(checks.some)
        checks.some()
        rest.result()
    checks.end()


class _Checks:
    """What has arrived and is yet to be verified, for as many threads as take from it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._waiting: deque[tuple[RankManifest, Chunk, np.ndarray]] = deque()
        self._altered: list[tuple[RankManifest, Chunk]] = []

    def add(self, rank: RankManifest, parts: Parts) -> None:
        self._waiting.extend((rank, chunk, here) for chunk, here in parts)

    def some(self, most: int | None = None) -> bool:
        """Verify up to `most` chunks, or all; whether there was one."""
        found = False
        while most is None or most > 0:
            try:
                rank, chunk, here = self._waiting.popleft()
            except IndexError:
                return found
            found = True
            if xxhash.xxh3_64_intdigest(here) != chunk.digest:
                self._altered.append((rank, chunk))
            most = None if most is None else most - 1
        return found

    def end(self) -> None:
        """Raises TransferError, naming the first chunk that does not have its digest."""
        if self._altered:
            rank, chunk = self._altered[0]
            raise TransferError(
                f"{self._attempt.place(rank, chunk)}: bytes differ from their digest; the slot was overwritten "
                "while it was read (a lease ended too soon) or they were altered on the way"
            )


def _nbytes(parts: Parts) -> int:
    return sum(chunk.nbytes for chunk, _ in parts)


