"""Proves that a run's sums agree: issued = trained + dropped + held, each counted from its own records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from milkweed.data.ledger.schema import BUFFERED, CONSUMED, RUNNING, read_index
from milkweed.data.ledger.segments import Segments
from milkweed.errors import DataError


class Report(msgspec.Struct, kw_only=True):
    """Samples by what became of them. `problems` are what should not be; `notes` are worth knowing, no more."""

    folder: str
    issued: int
    trained: int
    dropped: dict[str, int]
    running: int
    buffered: int
    unsaved: int
    """Trained by steps that no checkpoint holds yet; they count as held."""
    groups: int
    checkpoint: int
    lives: int
    max_lag: int
    retried: int
    problems: list[str]
    notes: list[str]

    @property
    def held(self) -> int:
        return self.running + self.buffered + self.unsaved

    @property
    def agrees(self) -> bool:
        return not self.problems

    def text(self) -> str:
        """For people."""
        dropped = sum(self.dropped.values())
        lines = [
            f"{self.folder}: {self.groups} groups, {self.lives} {'life' if self.lives == 1 else 'lives'}, checkpoint at step {self.checkpoint}, "
            f"oldest token trained {self.max_lag} steps late, {self.retried} attempts made again",
            f"issued {self.issued} = trained {self.trained} + dropped {dropped} + held {self.held}"
            f" ({self.running} being sampled, {self.buffered} waiting, {self.unsaved} trained since the checkpoint)",
            *(f"  dropped {count:8d}  {reason}" for reason, count in sorted(self.dropped.items(), key=lambda x: -x[1])),
            *(f"note: {n}" for n in self.notes),
            *(f"PROBLEM: {p}" for p in self.problems),
            "the sums agree" if self.agrees else "the sums do NOT agree",
        ]
        return "\n".join(lines)


def audit(folder: str | Path, *, tokens: bool = True) -> Report:
    """Audits the run in `folder` (or a ledger folder itself), also while it runs. `tokens` reads every token array that
    retention has left and checks it. Raises DataError where there is no ledger."""
    place = Path(folder)
    if (place / "ledger").is_dir():
        place = place / "ledger"
    index = read_index(place)
    try:
        index.execute("BEGIN")  # one moment for all counts
        report = _count(index, str(folder))
        _check(index, report)
        if tokens:
            _check_tokens(index, Segments(place / "segments"), report)
        return report
    finally:
        index.close()


def _one(index: sqlite3.Connection, query: str, *values: object) -> int:
    return index.execute(query, values).fetchone()[0] or 0


def _count(index: sqlite3.Connection, folder: str) -> Report:
    checkpoint = _one(index, "SELECT max(step) FROM checkpoints")
    states = dict(index.execute("SELECT state, count(*) FROM held GROUP BY state"))
    return Report(
        folder=folder,
        issued=_one(index, "SELECT sum(samples) FROM issued"),
        trained=_one(index, "SELECT count(*) FROM trained WHERE lost=0 AND step <= ?", checkpoint),
        dropped=dict(index.execute("SELECT reason, count(*) FROM dropped GROUP BY reason")),
        running=states.get(RUNNING, 0),
        buffered=states.get(BUFFERED, 0),
        unsaved=states.get(CONSUMED, 0),
        groups=_one(index, "SELECT count(*) FROM issued"),
        checkpoint=checkpoint,
        lives=_one(index, "SELECT count(*) FROM lives"),
        max_lag=_one(index, "SELECT max(lag) FROM trained"),
        retried=_one(index, "SELECT count(*) FROM failures"),
        problems=[],
        notes=[],
    )


COUNTED = "SELECT number, sample FROM trained WHERE lost=0 AND step <= (SELECT coalesce(max(step), 0) FROM checkpoints)"


def _check(index: sqlite3.Connection, report: Report) -> None:
    wrong = report.problems.append
    total = report.trained + sum(report.dropped.values()) + report.held
    if report.issued != total:
        wrong(f"issued {report.issued}, but trained + dropped + held is {total}")
    for one, other, query in (
        ("trained", "dropped", f"SELECT count(*) FROM ({COUNTED}) JOIN dropped USING (number, sample)"),
        ("trained", "held", f"SELECT count(*) FROM ({COUNTED}) JOIN held USING (number, sample)"),
        ("dropped", "held", "SELECT count(*) FROM dropped JOIN held USING (number, sample)"),
    ):
        if both := _one(index, query):
            wrong(f"{both} samples are both {one} and {other}")
    if twice := _one(index, "SELECT count(*) FROM (SELECT 1 FROM trained WHERE lost=0 GROUP BY number, sample HAVING count(*) > 1)"):
        wrong(f"{twice} samples were trained twice")
    for table in ("trained", "dropped", "held"):
        if strange := _one(
            index, f"SELECT count(*) FROM {table} t LEFT JOIN issued i USING (number) WHERE i.number IS NULL OR t.sample >= i.samples OR t.sample < 0"
        ):
            wrong(f"{strange} samples are {table} but were never issued")
    for stream, first, last, count in index.execute(
        "SELECT stream, min(position), max(position), count(DISTINCT position) FROM issued WHERE stream != '' GROUP BY stream"
    ):
        if last - first + 1 != count:
            wrong(f"stream {stream}: {last - first + 1 - count} of the prompts {first} to {last} were skipped")
    for step, incarnation, lag, bound in index.execute(
        "SELECT t.step, t.incarnation, max(t.lag), l.staleness FROM trained t JOIN lives l USING (incarnation) GROUP BY t.step, t.incarnation HAVING max(t.lag) > l.staleness"
    ):
        wrong(f"step {step} of life {incarnation} trained tokens {lag} steps old, over its bound of {bound}")
    ahead = _one(index, "SELECT count(*) FROM trained t WHERE lost=0 AND NOT EXISTS (SELECT 1 FROM finished f WHERE f.number=t.number AND f.sample=t.sample)")
    if ahead:
        wrong(f"{ahead} samples were trained but never finished")
    unsaved = _one(index, "SELECT count(*) FROM trained WHERE lost=0 AND step > ?", report.checkpoint)
    if unsaved != report.unsaved:
        wrong(f"{unsaved} samples were trained after the checkpoint, but {report.unsaved} are held as such")


def _check_tokens(index: sqlite3.Connection, segments: Segments, report: Report) -> None:
    """Held samples with torn tokens are sampled again at the next start; trained ones must be whole."""
    removed = {segment for (segment,) in index.execute("SELECT segment FROM segments")}
    torn_held = torn_trained = 0
    rows = index.execute(
        "SELECT f.segment, f.offset, h.number IS NOT NULL, EXISTS (SELECT 1 FROM trained t WHERE t.number=f.number AND t.sample=f.sample AND t.lost=0)"
        " FROM finished f LEFT JOIN held h ON h.number=f.number AND h.sample=f.sample ORDER BY f.segment, f.offset"
    )
    first = ""
    for segment, offset, held, trained in rows:
        if segment in removed:
            continue
        try:
            segments.read(segment, offset)
        except DataError as error:
            torn_held += bool(held)
            torn_trained += bool(trained and not held)
            if trained and not held:
                first = first or str(error)
    if torn_held:
        report.notes.append(f"the tokens of {torn_held} held samples are torn; the next start samples them again")
    if torn_trained:
        report.problems.append(f"the tokens of {torn_trained} trained samples cannot be read: {first}")
    if removed:
        report.notes.append(f"retention took the tokens of {len(removed)} segments away")
