"""Where every sample of a run is: issued, being sampled, waiting, trained, or dropped and why.

The loop calls `issue`, `finish`, `drop`, `train`, ...; these only append to a list. One writer thread turns the list into
bytes in the segments and rows in the index, a transaction a batch, in the order of the calls: what is on disk is always
the state that the run was in at some moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from milkweed.data.ledger.batches import pack_batch
from milkweed.data.ledger.records import HeldGroup, Issue, Model, Resumed, pack_trajectory, unpack_trajectory
from milkweed.data.ledger.resume import go_back
from milkweed.data.ledger.schema import BUFFERED, CONSUMED, RUNNING, open_index
from milkweed.data.ledger.segments import Segments
from milkweed.errors import DataError, no_room
from milkweed.types import Batch, Completion, PolicyVersion, Trajectory

WRITE_EVERY_S = 0.2
FULL_S = 0.5  # between two attempts at a full disk
MOST_WAITING = 50_000
"""Records that may wait for the writer before `room` makes the loop wait for it."""

_INSERT = {
    "issued": "INSERT INTO issued VALUES (?,?,?,?,?,?,?,?,?)",
    "held": "INSERT OR REPLACE INTO held VALUES (?,?,?)",
    "release": "DELETE FROM held WHERE number=? AND sample=?",
    "finished": "INSERT OR REPLACE INTO finished VALUES (?,?,?,?,?,?,?,?,?,?,?)",
    "turn": "INSERT OR REPLACE INTO turns VALUES (?,?,?,?,?)",
    "no turns": "DELETE FROM turns WHERE number=? AND sample=?",
    "failure": "INSERT INTO failures VALUES (?,?,?,?,?)",
    "dropped": "INSERT INTO dropped VALUES (?,?,?,?,?)",
    "trained": "INSERT INTO trained (number, sample, incarnation, step, place, lag, tokens) VALUES (?,?,?,?,?,?,?)",
    "step": "INSERT OR REPLACE INTO steps VALUES (?,?,?,?,?)",
    "model": "INSERT OR REPLACE INTO models VALUES (?,?,?,?,?,?,?)",
    "update": "INSERT OR REPLACE INTO updates VALUES (?,?,?,?,?,?,?,?)",
    "loss": "INSERT OR IGNORE INTO losses VALUES (?,?,?,?,?)",
    "checkpoint": "INSERT OR REPLACE INTO checkpoints VALUES (?,?,?)",
    "checkpointed": "DELETE FROM held WHERE state=? AND (number, sample) IN (SELECT number, sample FROM trained WHERE lost=0 AND step<=?)",
}


class Ledger:
    """The ledger in `folder`, for the one controller that runs there. Open it, `resume`, then record.

    `threaded` off writes in the caller's thread, when enough has come together or at `flush` (for virtual time).
    `keep_steps` N lets go of token arrays trained N steps before the last checkpoint; the index stays whole.
    Errors of the writer (a full disk) are raised by the next call.

    A sample takes about 40 us of one core and 115 bytes of index (10 million: 1.2 GB, audited in half a minute), and in the segments
    about 9 bytes a token and 400 more, and as much again for the batch it was trained in, until it is let go.
    """

    def __init__(
        self, folder: str | Path, *, threaded: bool = True, segment_bytes: int = 64 << 20, keep_steps: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self.keep_steps = keep_steps
        self.incarnation = 0
        self.seconds = 0.0
        """Processor time that the writer has taken."""
        self._segments = Segments(self.folder / "segments", segment_bytes=segment_bytes)
        self._index = open_index(self.folder)
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._writing = threading.Lock()
        self._turns: set[tuple[int, int]] = set()
        self._losses: set[str] = set()
        self._last_batch: tuple[bytes, tuple[int, int]] = b"", (0, 0)
        self._closed = False
        self._failure: BaseException | None = None
        self.on_full: Callable[[str], None] = lambda full: None
        self.full = ""
        """What the disk has no room for, while `room` and `flush` wait; `on_full` hears it in the writer's thread, "" after."""
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)

    # ---- records

    def issue(self, issues: Sequence[Issue]) -> None:
        """These prompts are given out; all their samples are held from now on."""
        rows: list[tuple[str, tuple[Any, ...]]] = []
        for i in issues:
            row = (i.number, i.group, i.stream, i.position, i.epoch, i.seed, i.prompt_id, i.samples, self.incarnation)
            rows.append(("issued", row))
            rows += [("held", (i.number, sample, RUNNING)) for sample in range(i.samples)]
        self._add(rows)

    def turn(self, number: int, sample: int, call: int, completion: Completion) -> None:
        """An unfinished sample has got its completion number `call`."""
        self._turns.add((number, sample))
        self._add([("turn", (number, sample, call, completion))])

    def finish(self, number: int, trajectory: Trajectory, seconds: float = 0.0) -> None:
        """A sample is finished, `seconds` after it was begun, and waits to be trained; or, where it is dropped already,
        goes with its reason."""
        t = copy.copy(trajectory)
        rows: list[tuple[str, tuple[Any, ...]]] = [("finished", (number, t, seconds)), *self._no_turns(number, t.index)]
        if t.dropped is None:
            rows.append(("held", (number, t.index, BUFFERED)))
        else:
            rows += self._drop(number, t.index, *split_reason(t.dropped))
        self._add(rows)

    def fail(self, number: int, sample: int, attempt: int, reason: str) -> None:
        """An attempt at a sample failed and another one is made."""
        self._add([("failure", (number, sample, attempt, self.incarnation, reason[:500])), *self._no_turns(number, sample)])

    def drop(self, number: int, samples: Sequence[int], reason: str, detail: str = "") -> None:
        """These samples will never be trained. `reason` is a kind, to be counted; `detail` is free."""
        self._add([row for sample in samples for row in self._drop(number, sample, reason, detail)])

    def _drop(self, number: int, sample: int, reason: str, detail: str) -> list[tuple[str, tuple[Any, ...]]]:
        row = (number, sample, reason[:200], detail[:500], self.incarnation)
        return [("dropped", row), ("release", (number, sample)), *self._no_turns(number, sample)]

    def _no_turns(self, number: int, sample: int) -> list[tuple[str, tuple[Any, ...]]]:
        """What was kept of an unfinished sample is of no more use."""
        if (number, sample) not in self._turns:
            return []
        self._turns.remove((number, sample))
        return [("no turns", (number, sample))]

    def train(
        self, version: PolicyVersion, samples: Sequence[tuple[int, int, int, int]], *, again: bool = False, note: Any = None
    ) -> None:
        """The step that made `version` trained these `(number, sample, lag, tokens)`, in this order. They stay held until
        a checkpoint at or after it."""
        numbers = list(dict.fromkeys(number for number, *_ in samples))
        rows: list[tuple[str, tuple[Any, ...]]] = []
        for place, (number, sample, lag, tokens) in enumerate(samples):
            rows.append(("trained", (number, sample, version.incarnation, version.step, place, lag, tokens)))
            rows.append(("held", (number, sample, CONSUMED)))
        rows.append(("step", (version.incarnation, version.step, int(again), json.dumps(numbers), json.dumps(note or {}))))
        self._add(rows)
        self._wake.set()  # a step is written at once: the less of it is lost, the less is done again

    def model(self, made: Model) -> None:
        """What this life trains as `made.role`."""
        self._add([("model", (self.incarnation, made.role, made.folder, made.head, made.config, made.mesh, made.stack))])

    def update(self, role: str, version: PolicyVersion, batch: Batch, loss: Any, peak_lr: float, result: dict[str, float]) -> None:
        """The optimiser step of `role` that made its `version`: `loss` (a Shipped) on `batch`, which is copied, and the
        numbers that came of it. From these the step can be taken again."""
        name = hashlib.blake2b(loss.payload, digest_size=16).hexdigest()
        rows: list[tuple[str, tuple[Any, ...]]] = []
        if name not in self._losses:
            self._losses.add(name)
            rows.append(("loss", (name, loss.name, loss.sha256, msgspec.json.encode(loss.parts).decode(), loss.payload)))
        copied = {key: tensor.clone() for key, tensor in batch.tensors().items()}
        facts = (copied, dict(batch.totals), batch.temperature)
        rows.append(("update", (role, version.step, version.incarnation, facts, name, peak_lr, json.dumps(result))))
        self._add(rows)

    def checkpoint(self, version: PolicyVersion) -> None:
        """A whole checkpoint of `version` is there: what was trained up to it counts. Call `flush(durable=True)` before
        the checkpoint is written, so that none is ever ahead of the ledger."""
        step = version.step
        self._add([("checkpoint", (step, version.incarnation, time.time())), ("checkpointed", (CONSUMED, step)), ("retain", (step,))])

    # ---- waiting for the writer

    async def room(self) -> None:
        """Waits while too much waits to be written, or the disk is full: call it before giving out more work."""
        while self.full:
            await asyncio.sleep(0.2)
        if len(self._waiting) >= MOST_WAITING:
            await self.flush()

    async def flush(self, *, durable: bool = False, deadline_s: float = 120.0) -> None:
        """Everything recorded so far is in the files; `durable`: on the disk too."""
        if self._thread is None:
            self._write(durable)
            self._check()
            return
        work = asyncio.ensure_future(asyncio.to_thread(self._write, durable))
        while not work.done():
            await asyncio.wait({work}, timeout=deadline_s)
            if not work.done() and not self.full:
                raise TimeoutError(f"the ledger in {self.folder} was not written within {deadline_s:g} s")
        self._check()

    def close(self) -> None:
        """Writes what waits and gives the files up. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(30.0)
        self._write(True)
        with contextlib.suppress(OSError):  # a full disk: `_failure` says so already
            self._segments.close()
        self._index.close()
        self._check()

    # ---- going back

    def resume(self, version: PolicyVersion, *, staleness: int = 0, same: bool = True) -> Resumed:
        """Begins a life at `version`, that of the checkpoint gone back to (step 0: none) under this life's incarnation.

        `same` says that the configuration is the one of the life before, so that training its steps again gives its
        weights again. Raises DataError where the ledger knows less than the checkpoint holds.
        """
        self._write(False)
        self._check()
        known_end = {
            segment: self._end(segment, offset)
            for segment, offset in self._index.execute(
                "SELECT segment, max(offset) FROM (SELECT segment, offset FROM finished UNION ALL SELECT segment, offset FROM turns"
                " UNION ALL SELECT segment, offset FROM updates) GROUP BY segment"
            )
        }
        cut = self._segments.cut(known_end)
        resumed = go_back(self._index, self._segments, version, staleness=staleness, same=same)
        resumed.cut = cut
        self._turns = {(h.issue.number, sample) for h in resumed.held for sample in h.turns}
        self.incarnation = version.incarnation
        if self._thread is not None:
            self._thread.start()
        return resumed

    def _end(self, segment: int, offset: int) -> int:
        """Where the record at `offset` ends; its beginning if it is torn (it will be cut)."""
        try:
            return offset + 12 + len(self._segments.read(segment, offset))
        except DataError:
            return offset

    def trajectory(self, number: int, sample: int) -> Trajectory:
        """A finished sample as it was recorded. Raises DataError where its tokens are gone or rotten."""
        row = self._index.execute("SELECT segment, offset FROM finished WHERE number=? AND sample=?", (number, sample)).fetchone()
        if row is None:
            raise DataError(f"the ledger knows no finished sample {sample} of group {number}")
        return unpack_trajectory(self._segments.read(*row))

    # ---- the writer

    def _add(self, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._check()
        if self._closed:
            raise DataError(f"the ledger in {self.folder} is closed")
        with self._lock:
            self._waiting += rows
            many = len(self._waiting) >= 5_000
        if many and self._thread is None:
            self._write(False)
        elif many:
            self._wake.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise DataError(f"the ledger in {self.folder} cannot be written: {self._failure}") from self._failure

    def _work(self) -> None:
        while not self._closed:
            self._wake.wait(WRITE_EVERY_S)
            self._wake.clear()
            self._write(False)

    def _write(self, durable: bool) -> None:
        """Everything that waits, as one transaction. Failures are kept for the loop, which they then end."""
        with self._writing:
            with self._lock:
                rows, self._waiting = self._waiting, []
            if self._failure is not None or not (rows or durable):
                return
            began = time.thread_time()
            try:
                self._commit(rows)
                if durable:
                    self._patient(lambda: self._segments.write(sync=True))
                    self._patient(lambda: self._index.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
            except (OSError, sqlite3.Error, ValueError, OverflowError) as error:
                self._failure = error
            self.seconds += time.thread_time() - began

    def _commit(self, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        if not rows:
            return
        ready = [(kind, self._prepare(kind, row)) for kind, row in rows]
        self._patient(self._segments.write)  # before the rows that speak of it
        self._patient(lambda: self._insert(ready))

    def _patient(self, work: Callable[[], object]) -> None:
        """Does `work`, again and again while the disk is full and the ledger is not being closed."""
        while True:
            try:
                work()
                if self.full:
                    self.full = ""
                    self.on_full("")
                return
            except (OSError, sqlite3.Error) as error:
                if not no_room(error) or self._thread is None or self._closed:
                    raise
                if not self.full:
                    self.full = f"{self.folder}: {error}"
                    self.on_full(self.full)
                time.sleep(FULL_S)

    def _insert(self, ready: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._index.execute("BEGIN IMMEDIATE")
        try:
            self._apply(ready)
            self._index.execute("COMMIT")
        except BaseException:
            if self._index.in_transaction:  # a full disk may have ended it already
                self._index.execute("ROLLBACK")
            raise

    def _apply(self, ready: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Rows of one table go in one call, and of what a sample's state came to be within these only the last: no order
        between tables matters but that of what looks at several."""
        tables: dict[str, list[tuple[Any, ...]]] = {}
        states: dict[tuple[int, int], int | None] = {}

        def flush() -> None:
            for kind, rows in tables.items():
                self._index.executemany(_INSERT[kind], rows)
            gone = [key for key, state in states.items() if state is None]
            self._index.executemany(_INSERT["held"], [(*key, state) for key, state in states.items() if state is not None])
            self._index.executemany(_INSERT["release"], gone)
            tables.clear()
            states.clear()

        for kind, row in ready:
            if kind == "held":
                number, sample, state = row
                states[number, sample] = state
            elif kind == "release":
                states[row] = None  # type: ignore[index]
            elif kind in ("checkpointed", "retain", "turn", "no turns"):
                flush()
                if kind == "retain":
                    self._retain(row[0])
                else:
                    self._index.execute(_INSERT[kind], row)
            else:
                tables.setdefault(kind, []).append(row)
        flush()

    def _prepare(self, kind: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
        if kind == "finished":
            number, t, seconds = row
            segment, offset = self._segments.append(pack_trajectory(t))
            versions = [s.version for q in (t.sequences if t.segments else (t,)) for s in q.versions] or [PolicyVersion()]
            parts = json.dumps(t.reward_parts) if t.reward_parts else None
            tokens = sum(len(q.token_ids) for q in t.sequences) if t.segments else len(t.token_ids)
            return (number, t.index, segment, offset, tokens, str(min(versions)), str(max(versions)), t.finish_reason, t.reward, parts, seconds)
        if kind == "turn":
            number, sample, call, completion = row
            return (number, sample, call, *self._segments.append(msgspec.msgpack.encode(completion)))
        if kind == "update":
            role, step, incarnation, facts, *rest = row
            packed = pack_batch(*facts)
            digest = hashlib.blake2b(packed, digest_size=16).digest()
            if self._last_batch[0] != digest or self._last_batch[1][0] != self._segments.number:  # several updates on one batch
                self._last_batch = digest, self._segments.append(packed)
            return (role, step, incarnation, *self._last_batch[1], *rest)
        return row

    def _retain(self, step: int) -> None:
        """Lets go of segments in which nothing is held and all that was trained is older than `keep_steps`."""
        if self.keep_steps is None:
            return
        for segment in self._segments.numbers():
            if segment >= self._segments.number:
                continue
            needed = self._index.execute(
                "SELECT 1 FROM finished f WHERE segment=? AND (EXISTS (SELECT 1 FROM held h WHERE h.number=f.number AND h.sample=f.sample)"
                " OR EXISTS (SELECT 1 FROM trained t WHERE t.number=f.number AND t.sample=f.sample AND t.lost=0 AND t.step>?))"
                " UNION ALL SELECT 1 FROM turns WHERE segment=? UNION ALL SELECT 1 FROM updates WHERE segment=? AND step>? LIMIT 1",
                (segment, step - self.keep_steps, segment, segment, step - self.keep_steps),
            ).fetchone()
            if needed is None:
                self._index.execute("INSERT OR REPLACE INTO segments VALUES (?,?)", (segment, self._segments.remove(segment)))


def split_reason(text: str) -> tuple[str, str]:
    """The kind of a drop (what stands before the first colon or bracket) and its detail."""
    return text.split(":")[0].split("(")[0].strip(), text


__all__ = ["HeldGroup", "Issue", "Ledger", "Resumed", "split_reason"]
