"""The index of a ledger: its tables, and how a connection to it is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from milkweed.errors import DataError

VERSION = 2
FILE = "index.sqlite"

RUNNING, BUFFERED, CONSUMED = 0, 1, 2
"""States of a held sample: being sampled; finished, waiting; trained by a step that no checkpoint holds yet."""

TABLES = """
CREATE TABLE lives (           -- one row each time the run was opened
    incarnation INTEGER PRIMARY KEY, resumed INTEGER NOT NULL, same INTEGER NOT NULL, staleness INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE issued (          -- one row a group: the prompt that was given out, and how many samples of it
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, stream TEXT NOT NULL, position INTEGER NOT NULL, epoch INTEGER NOT NULL,
    seed INTEGER NOT NULL, prompt TEXT NOT NULL, samples INTEGER NOT NULL, incarnation INTEGER NOT NULL);
CREATE UNIQUE INDEX issued_once ON issued (stream, position) WHERE stream != '';
CREATE TABLE finished (        -- the last attempt at each sample, and where its tokens lie
    number INTEGER, sample INTEGER, segment INTEGER NOT NULL, offset INTEGER NOT NULL, tokens INTEGER NOT NULL,
    oldest TEXT NOT NULL, newest TEXT NOT NULL, reason TEXT NOT NULL, reward REAL, parts TEXT,
    seconds REAL NOT NULL, PRIMARY KEY (number, sample)) WITHOUT ROWID;
CREATE TABLE turns (           -- completions of samples that are not finished yet
    number INTEGER, sample INTEGER, call INTEGER, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    PRIMARY KEY (number, sample, call)) WITHOUT ROWID;
CREATE TABLE failures (        -- attempts that failed and were made again
    number INTEGER NOT NULL, sample INTEGER NOT NULL, attempt INTEGER NOT NULL, incarnation INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE held (
    number INTEGER, sample INTEGER, state INTEGER NOT NULL, PRIMARY KEY (number, sample)) WITHOUT ROWID;
CREATE TABLE dropped (
    number INTEGER, sample INTEGER, reason TEXT NOT NULL, detail TEXT NOT NULL, incarnation INTEGER NOT NULL,
    PRIMARY KEY (number, sample)) WITHOUT ROWID;
CREATE TABLE trained (         -- lost: by a step that a later life went back over
    number INTEGER NOT NULL, sample INTEGER NOT NULL, incarnation INTEGER NOT NULL, step INTEGER NOT NULL, place INTEGER NOT NULL,
    lag INTEGER NOT NULL, tokens INTEGER NOT NULL, lost INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX trained_once ON trained (number, sample) WHERE lost = 0;
CREATE INDEX trained_at ON trained (step, incarnation);
CREATE TABLE steps (           -- again: the groups were those that this step had trained in an earlier life
    incarnation INTEGER, step INTEGER, again INTEGER NOT NULL, groups TEXT NOT NULL, note TEXT NOT NULL,
    PRIMARY KEY (incarnation, step)) WITHOUT ROWID;
CREATE TABLE models (          -- what was trained in a life, and how it was laid out: enough to build it again
    incarnation INTEGER, role TEXT, folder TEXT NOT NULL, head TEXT NOT NULL, config TEXT NOT NULL, mesh TEXT NOT NULL,
    stack TEXT NOT NULL, PRIMARY KEY (incarnation, role)) WITHOUT ROWID;
CREATE TABLE updates (         -- each optimiser step, by the role's own count: its batch, its loss, and what came of it
    role TEXT, step INTEGER, incarnation INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    loss TEXT NOT NULL, peak_lr REAL NOT NULL, result TEXT NOT NULL, PRIMARY KEY (role, step)) WITHOUT ROWID;
CREATE INDEX updates_in ON updates (segment, step);
CREATE TABLE losses (          -- functions by the hash of what was sent to the trainer
    payload_hash TEXT PRIMARY KEY, name TEXT NOT NULL, source_hash TEXT NOT NULL, parts TEXT NOT NULL, payload BLOB NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE segments (        -- those that retention took away
    segment INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE INDEX finished_in ON finished (segment, offset);
"""


def open_index(folder: Path) -> sqlite3.Connection:
    """The index for its one writer; made if it is not there. Raises DataError for a schema that this Milkweed does not
    know, or a file that is no index."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=4000")
        known = connection.execute("PRAGMA user_version").fetchone()[0]
        if known == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
            known = VERSION
    except sqlite3.DatabaseError as error:
        connection.close()
        raise DataError(f"{path} cannot be read as a ledger: {error}") from error
    _require(known, path, connection)
    return connection


def read_index(folder: Path) -> sqlite3.Connection:
    """The index for reading, also while a run writes it. Raises DataError where there is none."""
    path = folder / FILE
    if not path.exists():
        raise DataError(f"{folder} holds no ledger ({FILE})")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=30.0)
    try:
        known = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        connection.close()
        raise DataError(f"{path} cannot be read as a ledger: {error}") from error
    _require(known, path, connection)
    return connection


def _require(known: int, path: Path, connection: sqlite3.Connection) -> None:
    if known != VERSION:
        connection.close()
        raise DataError(f"{path} has schema {known}, this Milkweed knows {VERSION}: use the Milkweed that wrote it")
