"""The controller's handle on a policy that trains (or, as a reference, only scores), on a critic, on a reward model."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from milkweed.errors import DataError, FleetError, MilkweedError, RemoteError, TransferError
from milkweed.fleet.supervision import recycles
from milkweed.training.config import TrainerConfig
from milkweed.training.model import Head
from milkweed.training.rebuild import Ask, History
from milkweed.training.shipping import Shipped, ship
from milkweed.transfer.manifest import Grant, Manifest, join
from milkweed.transfer.plan import Box
from milkweed.types import Batch, Loss, PolicyVersion

if TYPE_CHECKING:
    import torch

    from milkweed.fleet import Fleet, Replica

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Trainer:
    """One policy, or one model with a value head, on its replica. Calls run one after another; one that is cancelled while it runs still ends there, and
    `version` then says so: an update happens whole or not at all.

    A rank that dies takes the others with it; new ones are brought to where they were (see `rebuild`) within the call that
    finds it, which then goes on. Only a fault that repeats is raised, as FleetError; without `history` every one is. What
    the ranks refuse on purpose (StepRefused, DataError, ConfigError, TransferError) comes as itself.

    `version` names the weights that the ranks hold. `busy_s` are the seconds the slowest rank has worked,
    `publish_s` those of the last `publish`, all measured in the ranks.
    """

    def __init__(
        self, replica: Replica, config: TrainerConfig, model: str | Path, *, head: Head = "policy", deadline_s: float = 600.0
    ) -> None:
        self.replica, self.config, self.model, self.head, self.deadline_s = replica, config, str(model), head, deadline_s
        self.version = PolicyVersion()
        self.busy_s = 0.0
        self.publish_s = 0.0
        self.trained: torch.Tensor | None = None
        """`[rows, seq]` log-probs of the batch of the last update under the weights that it began with; a policy's."""
        self.peak_lr = config.lr
        """The peak learning rate of the next update."""
        self.broken: dict[int, str] = {}
        """Checkpoints that the last `load` found unreadable and passed over, and why."""
        self.loss_source: Shipped | None = None
        """The loss of the last update."""
        self.result: dict[str, float] = {}
        """What the last update returned, also to a caller that was cancelled meanwhile."""
        self.history: History | None = None
        self._copies: Path | None = None
        self._closing = False
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        fleet: Fleet,
        model: str | Path,
        config: TrainerConfig,
        *,
        run_dir: str | Path | None = None,
        role: str = "trainer",
        index: int = 0,
        optimise: bool = True,
        head: Head = "policy",
        deadline_s: float = 300.0,
    ) -> Trainer:
        """Spawn the ranks and load the Hugging Face folder `model`; with `optimise` off, a reference policy.

        `head="value"` puts a value head (one number at each token) on the model in place of the vocabulary's: a critic
        or a reward model. The folder's own head (`score.weight`) is loaded; a policy's folder has none, so it begins at
        zero. Its `update` takes losses of a ValueOutput (`value_loss`, `reward_model_loss`).

        Raises ConfigError or DataError, naming the key or the file, where the folder or the degrees will not do; no
        process is left then.
        """
        from milkweed.training.actor import TrainerActor

        async def spawn() -> Replica:
            procs = config.world_size
            return await fleet.spawn(role, index, TrainerActor, procs=procs, distributed=procs > 1, deadline_s=deadline_s)

        replica = await spawn()
        trainer = cls(replica, config, model, head=head)
        try:
            if config.copy_every and run_dir and optimise:  # swept with what else the fleet has there, should nobody do it before
                trainer._copies = Path(f"/dev/shm/mw-{fleet.token}-copies-{role}{index}")
            begin = (str(model), config, str(run_dir) if run_dir else None, optimise, head, str(trainer._copies) if trainer._copies else None)
            await trainer._call("start", *begin, deadline_s=deadline_s)
            trainer.history = History(f"{role}{index}", spawn, begin, fleet.mesh.faults)
        except BaseException:
            await replica.stop()
            raise
        trainer.busy_s = 0.0  # what a start costs is no work on a step
        return trainer

    async def update(self, batch: Batch, loss: Loss, *, clip_norm: float | None = None) -> dict[str, float]:
        """One optimiser step; `version.step` grows by one.

        Returns loss, grad_norm, lr, tokens (trained), seen (all but padding), seconds (of the slowest rank), applied (0,
        and nothing has changed, where the batch trains no token), and the metrics that the loss returned. Raises
        StepRefused, with everything as it was, where loss or gradient is not finite or the loss function raises.
        """
        self.loss_source = shipped = ship(loss)  # anew every time, since what a cell's function closes over may have changed
        return await self.update_shipped(batch, shipped.payload, clip_norm=clip_norm)

    async def update_shipped(self, batch: Batch, loss: bytes, *, clip_norm: float | None = None) -> dict[str, float]:
        """`update` with a loss as `shipping.ship` packed it, a recorded one say."""
        from milkweed.training.batching import merge_rows

        async def work() -> dict[str, float]:
            answers = await self._call("update", batch, loss, clip_norm)
            self.version = answers[0]["version"]
            parts = [a["logprobs"] for a in answers]
            self.trained = merge_rows(parts, *batch.tokens.shape) if any(p is not None for p in parts) else None
            self.result = {**answers[0]["metrics"], "seconds": max(a["metrics"]["seconds"] for a in answers)}
            if self._copies is not None:
                await self._copy()
            return dict(self.result)

        return await self._whole(work)

    async def _copy(self) -> None:
        """Begins a copy where one is due. One that cannot be made (no room) is said and costs the run nothing."""
        assert self.history is not None
        try:
            if self.history.copying:
                await self._call("copied")
            if self.version.step % self.config.copy_every == 0:
                await self._call("copy")
        except (DataError, OSError) as error:
            self.history.copying = None
            _log.warning("%s: step %d was not copied into memory: %s", self.history.name, self.version.step, error)

    async def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[rows, seq]` log-prob of each token under this policy at `batch.temperature`; 0 at a sequence's first."""
        from milkweed.training.batching import merge_rows

        async def work() -> torch.Tensor:
            return merge_rows(await self._call("logprobs", batch), *batch.tokens.shape)

        return await self._whole(work)

    async def values(self, batch: Batch) -> torch.Tensor:
        """`[rows, seq]` what the value head says at each token, having read it; 0 on padding. `algorithms.values_before`
        aligns it with the tokens as `gae` wants it, `last_values` reads a reward model's scores from it. Raises
        ConfigError where the model is a policy."""
        from milkweed.training.batching import merge_rows

        async def work() -> torch.Tensor:
            return merge_rows(await self._call("values", batch), *batch.tokens.shape)

        return await self._whole(work)

    async def top_logprobs(self, batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (int64) and log-probs (over the full vocabulary at `batch.temperature`) of the `k` likeliest words for each
        token, best first, both `[rows, seq, k]`; log-probs are 0 at a sequence's first token."""
        from milkweed.training.batching import merge_rows

        async def work() -> tuple[torch.Tensor, torch.Tensor]:
            both = merge_rows(await self._call("top_logprobs", batch, k), *batch.tokens.shape)
            return both[:, :, 0].long(), both[:, :, 1].float()

        return await self._whole(work)

    async def save(self, state: dict[str, Any] | None = None, *, wait: bool = True) -> str:
        """Write a checkpoint with `state` (the controller's, what JSON can say) inside, whole or not there. Returns its
        folder; without `wait` as soon as all is copied, and `saved` tells when it is whole."""
        text = json.dumps(state or {})

        async def work() -> str:
            folder = (await self._call("save", text))[0]
            if wait:
                await self._call("saved", True)
            return folder

        return await self._whole(work)

    async def saved(self, *, wait: bool = False, deadline_s: float | None = None) -> bool:
        """Whether the checkpoint saved last is whole; with `wait`, once it is. Raises what writing it raised."""

        async def work() -> bool:
            return all(await self._call("saved", wait, deadline_s=deadline_s))

        return await self._whole(work)

    async def load(self, incarnation: int | None = None, *, step: int | None = None) -> dict[str, Any] | None:
        """Go back to the latest whole checkpoint of the run directory, or that of `step`; the state inside, or None where
        there is none.

        `version` gets `incarnation` (by default one more than the checkpoint's), so that weights trained after the
        checkpoint and lost never share a name with those trained now.
        """

        async def work() -> dict[str, Any] | None:
            answer = (await self._call("load", incarnation, step))[0]
            self.version, self.peak_lr, self.broken = answer["version"], answer["peak_lr"], answer["broken"]
            return None if answer["state"] is None else json.loads(answer["state"])

        return await self._whole(work)

    async def export(self, folder: str | Path, *, dtype: str = "float32") -> Path:
        """Write a Hugging Face folder (weights, config, tokenizer) with the present weights, whole or not there."""
        place = Path(folder).absolute()

        async def work() -> Path:
            await self._call("export", str(place), dtype)
            return place

        return await self._whole(work)

    async def publish(self, readers: Sequence[str], *, dtype: str | None = None, ttl_s: float = 60.0) -> Manifest:
        """Make the present weights readable by `readers`, each rank its own shards. Raises TransferError where both
        slots are still leased; then nothing is leased to `readers` for this version."""

        async def work() -> Manifest:
            before = self.busy_s
            try:
                manifest = join([m for m in await self._call("publish", list(readers), dtype, ttl_s) if m is not None])
            except TransferError:
                for reader in readers:
                    await self._call("release", reader, self.version)
                raise
            self.publish_s = self.busy_s - before
            return manifest

        return await self._whole(work)

    async def adopt(self, layout: bytes, dtype: str = "") -> tuple[list[list[Box]], int]:
        """Plan for engines of `layout` (an EngineLayout as MessagePack), `dtype` being sent ("": theirs). Returns what
        each rank brings, and the bytes of the slot that takes all of it. Raises TransferError."""

        async def work() -> tuple[list[list[Box]], int]:
            answers = await self._call("adopt", layout, dtype)
            return [boxes for boxes, _ in answers], answers[0][1]

        return await self._whole(work)

    async def reaches(self, grant: Grant) -> bool:
        """Whether every rank shares memory with whoever granted the slot."""

        async def work() -> bool:
            return all(await self._call("reaches", grant))

        return await self._whole(work)

    async def place(self, grants: Sequence[Grant], layout: str, dtype: str = "", *, deadline_s: float) -> tuple[PolicyVersion, int]:
        """Put the present weights into slots of this host; they are whole there when this returns. Returns the version
        and the bytes of one. On failure nobody knows what the slots hold: they must be revoked."""

        async def work() -> tuple[PolicyVersion, int]:
            before, version = self.busy_s, self.version
            sizes = await self._call("place", list(grants), layout, dtype, deadline_s=deadline_s)
            self.publish_s = self.busy_s - before
            return version, sum(sizes)

        return await self._whole(work)

    async def publish_packed(
        self, readers: Sequence[str], layout: str, dtype: str = "", *, ttl_s: float = 60.0
    ) -> Manifest:
        """As `publish`, packed for the engines."""

        async def work() -> Manifest:
            before = self.busy_s
            try:
                shares = await self._call("publish_packed", list(readers), ttl_s, layout, dtype)
                manifest = join([m for m in shares if m is not None])
            except TransferError:
                for reader in readers:
                    await self._call("release", reader, self.version)
                raise
            self.publish_s = self.busy_s - before
            return manifest

        return await self._whole(work)

    async def chunk(self, rank: int, version: PolicyVersion, number: int) -> bytes:
        """The bytes of one chunk of what rank `rank` published, as a message: the last resort."""

        async def work() -> bytes:
            return (await self._call("chunk", rank, version, number))[rank]

        return await self._whole(work)

    async def release(self, reader: str, version: PolicyVersion) -> None:
        """`reader` has what it wanted of `version` (or is dead): its lease ends."""

        async def work() -> None:
            await self._call("release", reader, version)

        await self._whole(work)

    async def set_lr(self, lr: float) -> float:
        """Make `lr` the peak learning rate from the next step on; warm-up and decay go on. Returns the next step's."""

        async def work() -> float:
            rate = (await self._call("set_lr", lr))[0]
            self.peak_lr = lr
            return rate

        return await self._whole(work)

    async def checksum(self) -> str:
        """Digest of all parameters, the same however they are cut over ranks."""

        async def work() -> str:
            return (await self._call("checksum"))[0]

        return await self._whole(work)

    async def stats(self) -> list[dict[str, Any]]:
        """Each rank's version, learning rate, seconds busy and to start, parameters, peak memory."""

        async def work() -> list[dict[str, Any]]:
            return await self._call("stats")

        return await self._whole(work)

    async def close(self) -> None:
        """Let the ranks give back what they hold, then end them. Safe to call twice and after a failure."""
        self._closing = True
        try:
            if self.replica.failure is None and not self.replica.stopped:
                await self._call("close", deadline_s=10.0)
        finally:
            if self.history is not None:
                self.history.close()
            await self.replica.stop()
            if self._copies is not None:
                await asyncio.to_thread(shutil.rmtree, self._copies, ignore_errors=True)

    async def _call(self, endpoint: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        """The ranks' values in rank order; their seconds go into `busy_s`."""
        while True:
            try:
                values = await self._ask(self.replica)(endpoint, *args, deadline_s=deadline_s)
            except FleetError as error:
                if self.history is None or self._closing or self.replica.stopped or not recycles(error):
                    raise
                self.replica = await self.history.rebuild(error, self.replica, self._ask)
                continue
            if self.history is not None:
                await self.history.heard(endpoint, args, values, self.version)
            return values

    def _ask(self, replica: Replica) -> Ask:
        async def ask(endpoint: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
            try:
                answers = await replica.call(endpoint, *args, deadline_s=deadline_s or self.deadline_s)
            except RemoteError as error:
                if isinstance(error.__cause__, (MilkweedError, msgspec.ValidationError)):
                    raise error.__cause__ from error
                raise
            self.busy_s += max(seconds for _, seconds in answers)
            return [value for value, _ in answers]

        return ask

    async def _whole(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after the calls before it, to its end even where the caller is cancelled."""

        async def alone() -> T:
            async with self._one_at_a_time:
                return await work()

        task = asyncio.ensure_future(alone())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # its end is seen by the next call
            raise
