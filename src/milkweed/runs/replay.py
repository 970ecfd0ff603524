"""`milkweed replay`: the trainer's part of a run, trained again from the ledger, to the same parameters.

Every optimiser step was written down with its batch (packing, order and log-probs as the trainer got them), its loss and
its rate. However the batches came about, these steps from the same model at the same layout give the same bits on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import msgspec

from milkweed.config import load_mesh
from milkweed.data.ledger.batches import unpack_batch
from milkweed.data.ledger.records import Model
from milkweed.data.ledger.schema import read_index
from milkweed.data.ledger.segments import Segments
from milkweed.errors import DataError
from milkweed.runs.directory import refuse_live
from milkweed.training.config import TrainerConfig
from milkweed.training.sources import Part, changed
from milkweed.types import PolicyVersion

EXACT = ("loss", "grad_norm", "lr", "tokens")


class Replayed(msgspec.Struct, kw_only=True):
    """What came of it. `parted` says at which step and quantity it first differed from the run, "" where nowhere;
    `parameters` whether the parameters are those of the run's checkpoint, None where there is none of that step."""

    role: str
    first: int
    last: int
    parted: str = ""
    parameters: bool | None = None

    @property
    def same(self) -> bool:
        return not self.parted and self.parameters is not False

    def text(self) -> str:
        """For people."""
        if self.parted:
            return f"{self.role}: steps {self.first} to {self.last}: NOT the same: {self.parted}"
        if self.parameters is False:
            return f"{self.role}: steps {self.first} to {self.last}: the same losses, but NOT the parameters of checkpoint {self.last}"
        bits = f"the parameters of checkpoint {self.last}, to the bit" if self.parameters else f"no checkpoint of step {self.last} to compare parameters with"
        return f"{self.role}: steps {self.first} to {self.last} trained again: the same losses and gradient norms; {bits}"


class Record:
    """The updates of one role in the ledger of `folder`. Raises DataError where there are none."""

    def __init__(self, folder: Path, role: str = "trainer") -> None:
        self.folder, self.role = folder, role
        self.index = read_index(folder / "ledger")
        self.segments = Segments(folder / "ledger" / "segments")
        row = self.index.execute("SELECT folder, head, config, mesh, stack FROM models WHERE role=? ORDER BY incarnation DESC", (role,)).fetchone()
        if row is None:
            raise DataError(f"{folder}: its ledger knows no {role}")
        self.model = Model(role=role, folder=row[0], head=row[1], config=row[2], mesh=row[3], stack=row[4])
        self.removed = {s for (s,) in self.index.execute("SELECT segment FROM segments")}
        self.checkpoint = self.index.execute("SELECT max(step) FROM checkpoints").fetchone()[0] or 0
        self.last = self.index.execute("SELECT max(step) FROM updates WHERE role=?", (role,)).fetchone()[0] or 0

    def first(self) -> int:
        """The earliest step from which on all updates are there, to the last."""
        first = self.last + 1
        for step, segment in self.index.execute("SELECT step, segment FROM updates WHERE role=? ORDER BY step DESC", (self.role,)):
            if step != first - 1 or segment in self.removed:
                break
            first = step
        return first

    def update(self, step: int) -> dict[str, Any]:
        """The batch, the loss's payload, the peak rate and the numbers that came of `step`."""
        segment, offset, loss, lr, result = self.index.execute(
            "SELECT u.segment, u.offset, l.payload, u.peak_lr, u.result FROM updates u JOIN losses l ON l.payload_hash = u.loss WHERE role=? AND step=?", (self.role, step)
        ).fetchone()
        return {"batch": unpack_batch(self.segments.read(segment, offset)), "loss": loss, "peak_lr": lr, "result": json.loads(result)}

    def refuse_changes(self, first: int, last: int) -> None:
        """Raises DataError, with the difference, where a loss of these steps is not what it was, or torch is not."""
        query = "SELECT DISTINCT l.name, l.parts FROM losses l JOIN updates u ON u.loss = l.payload_hash WHERE u.role=? AND u.step BETWEEN ? AND ?"
        for name, parts in self.index.execute(query, (self.role, first, last)).fetchall():
            if difference := changed(msgspec.json.decode(parts, type=list[Part])):
                raise DataError(f"the loss {name} is not what this run was trained with; put it back to replay the run:\n{difference}")
        for package, was in json.loads(self.model.stack).items():
            now = was if package == "machine" else _version(package)
            if now != was:
                raise DataError(f"the run was trained with {package} {was}, here is {now}: other bits would come of it; install {package}=={was}")

    def close(self) -> None:
        self.index.close()


def _version(package: str) -> str:
    if package == "torch":
        import torch

        return torch.__version__
    return installed_version(package)


async def replay(folder: str | Path, *, mesh: str = "", steps: int = 0, role: str = "trainer", say: Callable[[str], None] = lambda text: None) -> Replayed:
    """Train the recorded steps of `role` in the run `folder` again, up to `steps` (0: the last checkpoint, else the last
    step recorded), from the run's model, or from the earliest checkpoint that retention has left all steps after.

    Nothing of the run is changed. Raises RunLocked while a controller runs it, DataError where the ledger holds no updates, or a loss or torch has
    changed since; FleetError as `up` does.
    """
    from milkweed.fleet import Fleet
    from milkweed.training import Trainer

    place = Path(folder)
    record = Record(place, role)
    try:
        refuse_live(place)
        checkpoints = _checkpoints(place if role == "trainer" else place / role)
        last = steps or (record.checkpoint if role == "trainer" else max(checkpoints, default=0)) or record.last
        start = _start(record, checkpoints, last)
        record.refuse_changes(start + 1, last)
        config = msgspec.json.decode(record.model.config, type=TrainerConfig)
        with tempfile.TemporaryDirectory(prefix="milkweed-replay-") as logs:
            fleet = await Fleet.start(load_mesh(mesh or record.model.mesh), logs)
            try:
                say(f"starting the {role}")
                run_dir = place.absolute() if role == "trainer" else place.absolute() / role
                trainer = await Trainer.start(fleet, record.model.folder, config, run_dir=run_dir, role=role, head=record.model.head)  # type: ignore[arg-type]
                if start:
                    await trainer.load(0, step=start)
                result = await _train(trainer, record, start, last, say)
                if not result.parted and last in checkpoints:
                    own = await trainer.checksum()
                    await trainer.load(0, step=last)
                    result.parameters = own == await trainer.checksum()
                return result
            finally:
                await fleet.stop()
    except sqlite3.DatabaseError as error:
        raise DataError(f"{folder}: the ledger cannot be read: {error}") from error
    finally:
        record.close()


async def _train(trainer: Any, record: Record, start: int, last: int, say: Callable[[str], None]) -> Replayed:
    result = Replayed(role=record.role, first=start + 1, last=last)
    for step in range(start + 1, last + 1):
        update = record.update(step)
        if trainer.peak_lr != update["peak_lr"]:
            await trainer.set_lr(update["peak_lr"])
        now, then = await trainer.update_shipped(update["batch"], update["loss"]), update["result"]
        if trainer.version != PolicyVersion(trainer.version.incarnation, step):
            raise DataError(f"step {step} changed nothing when it was trained again")
        say(f"step {step}: loss {now['loss']:.6f}")
        for key in EXACT:
            if key in then and now[key] != then[key]:
                result.parted = f"step {step}: {key} was {then[key]!r} and is {now[key]!r}"
                return result
    return result


def _checkpoints(place: Path) -> list[int]:
    folders = (place / "checkpoints").glob("step-*")
    return sorted(int(f.name.removeprefix("step-")) for f in folders if (f / ".metadata").exists())


def _start(record: Record, checkpoints: list[int], last: int) -> int:
    first = record.first()
    if not 0 < last <= record.last or first > last:
        raise DataError(f"{record.folder}: the ledger holds updates {first} to {record.last} of the {record.role}, so step {last} cannot be replayed")
    if first == 1:
        return 0
    start = next((c for c in checkpoints if first - 1 <= c < last), None)
    if start is None:
        have = ", ".join(map(str, checkpoints)) or "none"
        raise DataError(f"{record.folder}: retention has left updates from {first} on, and no checkpoint between {first - 1} and {last} to begin from (there: {have})")
    return start


def main(folder: Path, *, mesh: str = "", steps: int = 0) -> int:
    """Replay the policy, and the critic where the run trained one; 0 where all is the same."""
    roles = ["trainer", "critic"] if (folder / "critic").is_dir() else ["trainer"]
    same = True
    for role in roles:
        result = asyncio.run(replay(folder, mesh=mesh, steps=steps if role == "trainer" else 0, role=role, say=lambda text: print(text, file=sys.stderr, flush=True)))
        print(result.text())
        same = same and result.same
    return 0 if same else 1
