"""Going back to a checkpoint: what the index says is held, and what the steps after it had trained."""

from __future__ import annotations

import json
import sqlite3
import time

from milkweed.data.ledger.records import HeldGroup, Issue, Resumed, unpack_trajectory
from milkweed.data.ledger.schema import BUFFERED, CONSUMED, RUNNING
from milkweed.data.ledger.segments import Segments
from milkweed.errors import DataError
from milkweed.types import PolicyVersion


def go_back(index: sqlite3.Connection, segments: Segments, version: PolicyVersion, *, staleness: int, same: bool) -> Resumed:
    """Makes the index that of a run at `version`, in one transaction, and reads what goes on from there.

    Steps after the checkpoint lose what they trained, which is held again. Samples whose tokens did not survive are to
    be sampled again. Prompts from lists, which cannot be found again, are dropped.
    """
    lives = index.execute("SELECT max(incarnation) FROM lives").fetchone()[0]
    if lives is not None and version.incarnation <= lives:
        raise DataError(f"the ledger has seen incarnation {lives}; a life of incarnation {version.incarnation} would share its names")
    reached = index.execute("SELECT max(step) FROM steps").fetchone()[0] or 0
    if lives is not None and reached < version.step:
        raise DataError(
            f"the checkpoint is of step {version.step}, the ledger knows steps up to {reached} only: part of it was lost; "
            "put the run's ledger folder back, or begin a new run from an exported model"
        )
    step = version.step
    index.execute("BEGIN IMMEDIATE")
    try:
        index.execute("INSERT INTO lives VALUES (?,?,?,?,?)", (version.incarnation, step, int(same), staleness, time.time()))
        index.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
        if step:
            index.execute("INSERT OR REPLACE INTO checkpoints VALUES (?,?,?)", (step, version.incarnation, time.time()))
        index.execute("DELETE FROM updates WHERE role='trainer' AND step > ?", (step,))
        again = _steps_after(index, step)
        # what a checkpoint after this one had counted, which cannot be read any more, is held again
        index.execute("INSERT OR IGNORE INTO held SELECT number, sample, ? FROM trained WHERE lost=0 AND step > ?", (CONSUMED, step))
        index.execute("UPDATE trained SET lost=1 WHERE lost=0 AND step > ?", (step,))
        index.execute("DELETE FROM held WHERE (number, sample) IN (SELECT number, sample FROM trained WHERE lost=0)")
        index.execute(
            "INSERT INTO dropped SELECT h.number, h.sample, 'lost with an interrupted step', '', ? FROM held h JOIN issued i USING (number) WHERE i.stream=''",
            (version.incarnation,),
        )
        index.execute("DELETE FROM held WHERE number IN (SELECT number FROM issued WHERE stream='')")
        held = _held(index, segments)
        for group in held:
            index.executemany(
                "UPDATE held SET state=? WHERE number=? AND sample=?",
                [(BUFFERED, group.issue.number, s) for s in group.finished] + [(RUNNING, group.issue.number, s) for s in group.unfinished],
            )
    except BaseException:
        index.execute("ROLLBACK")
        raise
    index.execute("COMMIT")
    return Resumed(
        held=held,
        again=again,
        streams=dict(index.execute("SELECT stream, max(position) + 1 FROM issued WHERE stream != '' GROUP BY stream")),
        next_number=(index.execute("SELECT max(number) FROM issued").fetchone()[0] or 0) + 1,
        lives=_lives(index),
        steps=index.execute("SELECT incarnation, step, groups FROM steps ORDER BY incarnation, step").fetchall(),
    )


def _steps_after(index: sqlite3.Connection, step: int) -> dict[int, list[int]]:
    """The groups of each step after `step`, as the last life that took it trained them; as far as they follow each
    other and no life between changed the configuration."""
    begins = index.execute("SELECT max(incarnation) FROM lives WHERE same=0").fetchone()[0] or 0
    rows = index.execute(
        "SELECT step, groups, max(incarnation) FROM steps WHERE step > ? AND incarnation >= ? GROUP BY step ORDER BY step", (step, begins)
    )
    again: dict[int, list[int]] = {}
    for number, groups, _ in rows:
        if number != step + 1 + len(again):
            break
        again[number] = json.loads(groups)
    return again


def _held(index: sqlite3.Connection, segments: Segments) -> list[HeldGroup]:
    groups: dict[int, HeldGroup] = {}
    rows = index.execute(
        "SELECT h.number, h.sample, h.state, f.segment, f.offset, i.name, i.stream, i.position, i.epoch, i.seed, i.prompt, i.samples"
        " FROM held h JOIN issued i USING (number) LEFT JOIN finished f ON f.number=h.number AND f.sample=h.sample ORDER BY h.number, h.sample"
    )
    for number, sample, state, segment, offset, name, stream, position, epoch, seed, prompt, samples in rows:
        group = groups.get(number)
        if group is None:
            issue = Issue(number=number, group=name, stream=stream, position=position, epoch=epoch, seed=seed, prompt_id=prompt, samples=samples)
            group = groups[number] = HeldGroup(issue=issue, finished={}, unfinished=[])
        trajectory = None
        if state != RUNNING and segment is not None:
            try:
                trajectory = unpack_trajectory(segments.read(segment, offset))
            except DataError:
                trajectory = None  # its tokens were torn off with the segment's tail: it is sampled again
        if trajectory is None:
            group.unfinished.append(sample)
        else:
            group.finished[sample] = trajectory
    for number, sample, _, segment, offset in index.execute("SELECT number, sample, call, segment, offset FROM turns ORDER BY number, sample, call"):
        if number in groups and sample in groups[number].unfinished:
            try:
                groups[number].turns.setdefault(sample, []).append(segments.read(segment, offset))
            except DataError:
                continue  # as above: asked for again
    return list(groups.values())


def _lives(index: sqlite3.Connection) -> list[tuple[int, int, int]]:
    """`(incarnation, step it went back to, the life that began its configuration)`, oldest first."""
    lives, configuration = [], 0
    for incarnation, resumed, same in index.execute("SELECT incarnation, resumed, same FROM lives ORDER BY incarnation"):
        configuration = configuration if same else incarnation
        lives.append((incarnation, resumed, configuration))
    return lives
