"""A version's bytes by one-sided READs, each verified in a second thread while the next ones arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from milkweed.errors import TransferError
from milkweed.transfer.arrival import Arrival
from milkweed.transfer.attempt import Attempt, naming
from milkweed.transfer.manifest import Chunk, RankManifest
from milkweed.transfer.nixl import Read
from milkweed.transfer.session import Session

WINDOW_BYTES, WINDOW = 32 << 20, 64
"""Bytes and READs posted ahead: over a network one alone would wait a round trip for each chunk."""
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
    """Do every READ, a window of them posted at a time, verifying in a second thread what has arrived."""
    posted: deque[tuple[RankManifest, Parts, Read, bool]] = deque()
    ahead = 0
    checks: list[tuple[RankManifest, Future[Chunk | None]]] = []
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
            began = time.monotonic()
            with naming(attempt.place(rank, parts[0][0])):
                while not done:
                    # polling is what moves the bytes of a network transport; who rests has half the speed
                    time.sleep(0 if time.monotonic() - began < SPIN_S else 2e-4)
                    done = read.done()
                    if not done and time.monotonic() > attempt.deadline:
                        break
            if not done:
                attempt.check_time(rank, parts[0][0])
            checks.append((rank, verifier.submit(_altered, parts)))
        for rank, check in checks:
            if (chunk := check.result()) is not None:
                raise TransferError(
                    f"{attempt.place(rank, chunk)}: bytes differ from their digest; the slot was overwritten "
                    "while it was read (a lease ended too soon) or they were altered on the way"
                )


def _nbytes(parts: Parts) -> int:
    return sum(chunk.nbytes for chunk, _ in parts)


def _altered(parts: Parts) -> Chunk | None:
    """The first chunk that does not have its digest."""
    return next((chunk for chunk, here in parts if xxhash.xxh3_64_intdigest(here) != chunk.digest), None)
