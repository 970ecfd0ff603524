"""A trainer whose ranks died comes back: new ranks, the last checkpoint (or a newer copy in the host's memory, where
`copy_every` asks for some), and the steps since trained again.

The controller keeps what the ranks were told since that checkpoint, each step's batch and packed loss, in a file without a
name, which ends with it: as memory, batches of many steps would be gigabytes. Training the same batches again gives the same
weights, and that is checked: a step whose loss or norm of the gradient differs ends the rebuilding, since its version would
name two sets of weights.
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from milkweed.config import FaultsConfig
from milkweed.errors import FleetError, MilkweedError
from milkweed.fleet.supervision import Event, kind_of
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.fleet import Replica

Ask = Callable[..., Awaitable[list[Any]]]
SAME = ("loss", "grad_norm", "tokens")


class Told(msgspec.Struct, frozen=True):
    """One call whose effect the ranks hold: where its arguments lie in the file, or why they are `lost`, and the metrics that
    came of it."""

    endpoint: str
    offset: int
    lost: str = ""
    metrics: dict[str, Any] | None = None


class History:
    """What makes new ranks the ranks that died."""

    def __init__(self, name: str, spawn: Callable[[], Awaitable[Replica]], start: tuple[Any, ...], budget: FaultsConfig = FaultsConfig()) -> None:
        self.name, self._spawn, self._start, self._budget = name, spawn, start, budget
        self._origin: tuple[int | None, int | None] | None = None
        self._told: list[Told] = []
        self._file = tempfile.TemporaryFile(prefix="milkweed-steps-", buffering=0)
        self._adopted: tuple[Any, ...] | None = None
        self._saving: PolicyVersion | None = None
        self._copy: tuple[PolicyVersion, int] | None = None
        """The newest whole copy in memory, and how many of `_told` are in it."""
        self.copying: tuple[PolicyVersion, int] | None = None
        """The same of one under way."""
        self._failures = 0
        self.note: Callable[[Event], None] = lambda event: None

    async def heard(self, endpoint: str, args: tuple[Any, ...], answers: list[Any], version: PolicyVersion) -> None:
        """The ranks have done this; what it changes in them is kept. One call at a time."""
        if endpoint == "update":
            self._failures = 0
            if answers[0]["metrics"].get("applied", 1.0):
                await self._keep(endpoint, args, answers[0]["metrics"])
        elif endpoint == "set_lr":
            await self._keep(endpoint, args)
        elif endpoint == "save":  # whole only once `saved` says so; until then it is written again too
            await self._keep(endpoint, args)
            self._saving = version
        elif endpoint == "saved" and all(answers) and self._saving is not None:
            last = max((i for i, told in enumerate(self._told) if told.endpoint == "save"), default=-1)
            self._origin = (self._saving.incarnation, self._saving.step)
            await asyncio.to_thread(self._forget, last + 1)
            self._saving = None
        elif endpoint == "copy":
            self.copying = (version, len(self._told))
        elif endpoint == "copied" and all(answers):
            self._copy, self.copying = self.copying or self._copy, None
        elif endpoint == "adopt":
            self._adopted = args
        elif endpoint == "load":
            loaded: PolicyVersion = answers[0]["version"]
            self._origin = (loaded.incarnation, loaded.step if answers[0]["state"] is not None else None)
            await asyncio.to_thread(self._forget, len(self._told))
            self._saving = self._copy = self.copying = None

    async def _keep(self, endpoint: str, args: tuple[Any, ...], metrics: dict[str, Any] | None = None) -> None:
        self._told.append(Told(endpoint, *await asyncio.to_thread(self._append, args), metrics=metrics))

    def _append(self, args: tuple[Any, ...]) -> tuple[int, str]:
        """Where they lie, and why they do not."""
        offset = self._file.seek(0, 2)
        try:
            self._write(pickle.dumps(args, protocol=5))
        except OSError as error:  # training goes on; only these steps cannot be trained again
            self._file.truncate(offset)
            return offset, f"its batch could not be kept: {error.strerror or error}"
        return offset, ""

    def _forget(self, count: int) -> None:
        """The first `count` calls are in a checkpoint: their room in the file is given back."""
        kept, at = self._told[count:], self._file.seek(0, 2)
        start = kept[0].offset if kept else at
        if start:
            self._file.seek(start)
            rest = self._file.read()
            self._file.seek(0)
            self._write(rest)  # over what is there already, so a full disk does not matter
            self._file.truncate(len(rest))
        self._told = [msgspec.structs.replace(told, offset=told.offset - start) for told in kept]
        # a copy that is older than the checkpoint is of no use any more
        self._copy, self.copying = ((c[0], c[1] - count) if c and c[1] >= count else None for c in (self._copy, self.copying))

    def _write(self, data: bytes) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):  # an unbuffered file may take less than it is given
                done += self._file.write(view[done:]) or 0

    def _args(self, told: Told) -> tuple[Any, ...]:
        if told.lost:
            raise MilkweedError(f"{told.endpoint} cannot be done again: {told.lost}; resume the run from its checkpoint")
        self._file.seek(told.offset)
        return pickle.load(self._file)

    def _usable(self) -> tuple[PolicyVersion, int] | None:
        """The copy to begin from. A checkpoint that was not whole yet must be written again, so no copy after it will do."""
        saves = [i for i, told in enumerate(self._told) if told.endpoint == "save"]
        late = self._copy is not None and self._saving is not None and saves and self._copy[1] > saves[-1]
        return None if late else self._copy

    def close(self) -> None:
        """No rebuilding after this; what was kept is gone."""
        self._file.close()

    @property
    def steps(self) -> int:
        """Steps that would have to be trained again."""
        copy = self._usable()
        return sum(told.endpoint == "update" for told in self._told[copy[1] if copy else 0 :])

    async def rebuild(self, error: FleetError, dead: Replica, ask: Callable[[Replica], Ask]) -> Replica:
        """New ranks in the state of those of `dead`, which `error` ended. Raises FleetError where they fail too often, or
        come out differently."""
        clock = asyncio.get_running_loop().time
        began, first = clock(), error
        while True:
            self._failures += 1
            self.copying = None  # who was making it is gone
            self.note(Event(self.name, "failed", kind_of(error), str(error), clock() - began))
            await dead.stop()
            if self._failures > self._budget.retries:
                cause = f"it failed {self._failures} times without a step in between, the last: {error.cause}"
                self.note(Event(self.name, "given up", kind_of(error), cause))
                raise FleetError(self.name, kind_of(error), cause) from error
            await asyncio.sleep(self._budget.rest_s(self._failures))
            try:
                dead = await self._spawn()
                await self._restore(ask(dead))
            except FleetError as again:
                error = again
                continue
            except MilkweedError as refusal:
                await dead.stop()
                raise FleetError(self.name, "refused", f"it failed ({first.cause}) and could not be rebuilt: {refusal}") from refusal
            since = " since its copy in memory" if self._usable() else ""
            self.note(Event(self.name, "replaced", kind_of(first), f"{self.steps} steps trained again{since}", clock() - began))
            return dead

    async def _restore(self, ask: Ask) -> None:
        await ask("start", *self._start)
        told = self._told
        if (copy := self._usable()) is not None:
            version, count = copy
            try:
                if (came := (await ask("restore", version.incarnation, version.step))[0]) != version:
                    raise MilkweedError(f"it came back as version {came}")
            except FleetError:
                raise
            except MilkweedError as error:  # half of it may be in these ranks: others begin at the checkpoint
                self._copy = None
                raise FleetError(self.name, "refused", f"the copy of step {version.step} in memory could not be read: {error}") from error
            told = told[count:]
        elif self._origin is not None:
            incarnation, step = self._origin
            answer = (await ask("load", incarnation, step))[0]
            if step is not None and answer["version"] != PolicyVersion(incarnation or 0, step):
                raise MilkweedError(f"checkpoint {step} came back as version {answer['version']}")
        for call in told:
            answers = await ask(call.endpoint, *await asyncio.to_thread(self._args, call))
            if (before := call.metrics) is not None:
                now = answers[0]["metrics"]
                if different := [k for k in SAME if now.get(k) != before.get(k)]:
                    key = different[0]
                    raise MilkweedError(f"step {answers[0]['version'].step} trained again gave {key} {now.get(key)!r}, not {before.get(key)!r}; resume the run from its checkpoint")
        if self._adopted is not None:
            await ask("adopt", *self._adopted)
