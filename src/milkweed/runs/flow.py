"""What a run has going on behind its loop: groups made ahead, weights on their way, an evaluation, and the ledger of it all.

At staleness 0 nothing goes on behind the loop, and only the ledger is left of this.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import platform
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from milkweed.data.ledger import Issue, Ledger, Model, Resumed
from milkweed.errors import ConfigError, MilkweedError, TransferError
from milkweed.runs.generator import Generator, Limits
from milkweed.runs.lineage import Lineage
from milkweed.runs.sampling import Handle, sample_players, seeds
from milkweed.types import Completion, Environment, Group, PolicyVersion, Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    from milkweed.data import PromptStream
    from milkweed.runs.config import RunConfig
    from milkweed.runs.mesh import Mesh
    from milkweed.training import Trainer
    from milkweed.types import Batch


class Journal(Handle):
    """A handle whose completions outlive the controller: all but the last go into the ledger when the next is asked for,
    and a trajectory that is begun again gets them back as long as it asks for the same."""

    def __init__(self, *args: Any, ledger: Ledger, number: int, sample: int, known: Sequence[bytes] = ()) -> None:
        super().__init__(*args)
        self._ledger, self._number, self._sample = ledger, number, sample
        self._known = list(known)
        self._calls = itertools.count()
        self._last: tuple[int, Completion] | None = None

    async def sample(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        call, sampling = next(self._calls), self._seeded(sampling)
        if call < len(self._known):
            known = msgspec.msgpack.decode(self._known[call], type=Completion)
            if known.prompt_ids == list(token_ids) and known.sampling == sampling:
                return known
            self._known = []  # it took another way this time
        if self._last is not None:
            self._ledger.turn(self._number, self._sample, *self._last)
        completion = await super().sample(token_ids, sampling)
        self._last = (call, completion)
        return completion


class Flow:
    """Made by a run that has a trainer; engines only where it samples. `resume` first; `close` last."""

    def __init__(self, config: RunConfig, folder: Path, mesh: Mesh, say: Callable[[str], None], *, threaded: bool = True) -> None:
        self.config, self.mesh, self.say = config, mesh, say
        self.ledger = Ledger(folder / "ledger", threaded=threaded, keep_steps=config.keep_tokens_steps or None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ledger.on_full = self._full
        self.resumed: Resumed | None = None
        self.update: dict[str, float] = {}
        """What the last finished publishing took."""
        self._generators: dict[str, Generator] = {}
        self._lineage = Lineage()
        self._lost_updates = 0
        self._delivery: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[Any] | None = None
        self._numbers = itertools.count(1)
        self._listed: list[tuple[int, int, int, int]] = []

    def _full(self, full: str) -> None:
        """In the ledger's thread."""
        text = f"the disk is full, and the run waits until it has room: {full}" if full else "the disk has room again: the run goes on"
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.say, text)

    @property
    def behind(self) -> bool:
        """True where publishing and evaluation do not hold the loop up."""
        return self.config.staleness > 0

    def resume(self, version: PolicyVersion, *, same: bool) -> None:
        """Begin a life at `version`. Raises DataError where ledger and checkpoint do not go together."""
        self.resumed = r = self.ledger.resume(version, staleness=self.config.staleness, same=same)
        self._lineage = Lineage(r.lives, r.steps)
        self._numbers = itertools.count(r.next_number)
        if r.held:
            whole = sum(len(h.finished) for h in r.held)
            self.say(f"the ledger holds {len(r.held)} groups: {whole} samples are kept, {sum(len(h.unfinished) for h in r.held)} begun again")

    def describe(self, models: Sequence[Trainer | None]) -> None:
        """Writes down what this life trains, so that it can be built again."""
        import torch

        stack = json.dumps({"torch": torch.__version__, "torchtitan": version("torchtitan"), "machine": platform.machine()})
        for m in models:
            if m is not None:
                config = msgspec.json.encode(m.config).decode()
                mesh = str(Path(self.mesh.config.origin).absolute())
                self.ledger.model(Model(role=m.replica.role, folder=m.model, head=m.head, config=config, mesh=mesh, stack=stack))

    # ---- groups

    def place(self, stream: PromptStream, name: str) -> None:
        """Puts `stream` where the ledger says it goes on."""
        assert self.resumed is not None
        if name in self.resumed.streams:
            stream.seek(self.resumed.streams[name])

    async def take(
        self,
        env: Environment,
        stream: PromptStream,
        name: str,
        *,
        groups: int,
        samples: int,
        sampling: Sampling,
        keep: Callable[[Group], bool] | None,
    ) -> list[Group]:
        """The next batch of `groups` groups from `stream`; the first call says what is made ahead from then on."""
        assert self.mesh.rollout is not None
        self._loop = asyncio.get_running_loop()
        generator = self._generators.get(name)
        if generator is None:
            generator = self._generators[name] = self._start(env, stream, name, groups, samples, sampling, keep)
        elif (generator.limits.groups, generator.limits.samples) != (groups, samples):
            raise ConfigError(f"stream {name} makes {generator.limits.groups} groups of {generator.limits.samples} ahead; groups and n cannot change to {groups} and {samples}")
        if self._delivery is not None and self._delivery.done():
            await self.delivered()
        if self._delivery is None and self.mesh.rollout.version != self.mesh.version:
            await self.publish()  # an interrupted step may have trained without publishing, or its weights did not arrive
        return await generator.take(self.mesh.version)

    def _start(
        self, env: Environment, stream: PromptStream, name: str, groups: int, samples: int, sampling: Sampling, keep: Callable[[Group], bool] | None
    ) -> Generator:
        assert self.resumed is not None and self.mesh.rollout is not None
        c, router = self.config, self.mesh.rollout
        held = [h for h in self.resumed.held if h.issue.stream == name]
        turns = {(h.issue.number, sample): known for h in held for sample, known in h.turns.items()}

        async def make(prompt: Prompt, issue: Issue, sample: int, attempt: int) -> Trajectory:
            known = turns.pop((issue.number, sample), ())
            drawn = seeds(c.seed, issue.group, sample) if c.deterministic else None
            policy = (router, sampling, f"{issue.group}/{sample}", self.mesh.reward, self.mesh.chat, drawn, self.mesh.environment)
            handle = Journal(*policy, ledger=self.ledger, number=issue.number, sample=sample, known=known)
            several = await sample_players(
                env, prompt, lambda: handle, issue.group, sample, sampling=sampling, seed=c.seed, deadline_s=c.trajectory_deadline_s, retries=0, again=attempt > 0
            )
            if len(several) > 1:
                names = ", ".join(t.agent or "?" for t in several)
                raise ConfigError(f"the environment has several players ({names}): give run.sample a list of prompts, not a stream")
            return several[0]

        limits = Limits(
            groups=groups,
            samples=samples,
            staleness=c.staleness,
            steps=c.steps,
            late=c.late,
            oversample=c.oversample,
            retries=c.retries,
            stalled_s=c.trajectory_deadline_s * (c.retries + 1) + self.mesh.update_deadline_s,
        )
        generator = Generator(
            limits,
            stream,
            make,
            self.ledger,
            name=name,
            version=router.version,
            lineage=self._lineage,
            keep=keep,
            numbers=self._numbers,
            say=self.say,
        )
        generator.restore(held, stream.at, self.resumed.again)
        return generator

    def listed(self, groups: Sequence[Group]) -> None:
        """Writes down groups that were sampled from a list of prompts, outside any stream."""
        issues = [
            Issue(number=next(self._numbers), group=g.id, stream="", position=0, epoch=0, seed=self.config.seed, prompt_id=g.prompt.id, samples=len(g.trajectories))
            for g in groups
        ]
        self._drop_listed()
        self.ledger.issue(issues)
        for issue, group in zip(issues, groups):
            for t in group.trajectories:
                self.ledger.finish(issue.number, t)
                if t.dropped is None:
                    lag = max((self._lineage.lag(s.version, self.mesh.version) for q in t.sequences for s in q.versions), default=0)
                    self._listed.append((issue.number, t.index, lag, t.sampled))

    def _drop_listed(self) -> None:
        for number, rows in itertools.groupby(self._listed, key=lambda row: row[0]):
            self.ledger.drop(number, [sample for _, sample, *_ in rows], "handed out but not trained")
        self._listed = []

    def trained(self, version: PolicyVersion) -> None:
        """The groups handed out last made `version`; a further update on them is a step that trained nothing new, written
        down too, since a resume wants every step that its checkpoint is of."""
        written = bool(self._listed)
        if self._listed:
            self.ledger.train(version, self._listed)
            self._lineage.trained(version, list(dict.fromkeys(number for number, *_ in self._listed)))
            self._listed = []
        for generator in self._generators.values():
            written = generator.trained(version) or written
        if not written:
            self.ledger.train(version, [])
            self._lineage.trained(version, [])

    def updated(self, model: Trainer, batch: Batch) -> None:
        """`model` has just taken an optimiser step on `batch`: kept so that it can be taken again. After `trained`."""
        assert model.loss_source is not None
        numbers = {k: v for k, v in model.result.items() if k != "seconds"}
        self.ledger.update(model.replica.role, model.version, batch, model.loss_source, model.peak_lr, numbers)

    def metrics(self) -> dict[str, float]:
        """Of the last batch and of what was not trained since the one before."""
        row: dict[str, float] = {}
        for generator in self._generators.values():
            lags = generator.lags
            row |= {"lag": sum(lags) / len(lags) if lags else 0.0, "lag_max": float(max(lags, default=0)), "ahead": float(generator.outstanding)}
            row |= {name: float(count) for name, count in generator.counts.items() if count}
            generator.counts = dict.fromkeys(generator.counts, 0)
        return row

    # ---- weights

    async def publish(self) -> dict[str, float]:
        """Gives the engines the trainer's weights: before it returns at staleness 0; else behind the loop, one at a time,
        and what is returned is the last that ended. A failure is raised by the next call."""
        if not self.behind:
            update = await self.mesh.publish()
            self.served()
            return update
        await self.delivered()
        offered = asyncio.Event()
        self._delivery = asyncio.create_task(self._deliver(offered), name="weights to the engines")
        if self._evaluation is None or self._evaluation.done():
            await offered.wait()  # the trainer's next step waits for no more than this
        return self.update

    async def _deliver(self, offered: asyncio.Event) -> None:
        try:
            if self._evaluation is not None:  # it names one version, so the engines keep it that long
                await asyncio.wait([self._evaluation])
            self.update = await self.mesh.publish(offered.set)
            self._lost_updates = 0
            self.served()
        except MilkweedError as error:
            self._lost_updates += 1
            if isinstance(error, TransferError) and self._lost_updates < 2:
                self.say(f"the engines stay at {self.mesh.rollout.version}, and sampling within the bound: {error}")  # type: ignore[union-attr]
                return
            for generator in self._generators.values():
                generator.fail(error)
            raise
        finally:
            offered.set()

    async def delivered(self) -> None:
        """Waits for the publishing under way, if there is one; raises what it raised."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            await delivery

    def served(self) -> None:
        """The engines serve another version now."""
        assert self.mesh.rollout is not None
        for generator in self._generators.values():
            generator.serve(self.mesh.rollout.version)

    # ---- evaluation

    def evaluate(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` beside training. The engines keep their version until it is done."""
        self._evaluation = asyncio.create_task(work, name="evaluation")

    async def evaluated(self) -> None:
        """Waits for the evaluation under way, if there is one; raises what it raised."""
        task, self._evaluation = self._evaluation, None
        if task is not None:
            await task

    # ---- checkpoints and the end

    async def before_checkpoint(self) -> None:
        """Call it before a checkpoint is written, which must never be ahead of the ledger."""
        await self.evaluated()
        await self.ledger.flush(durable=True)

    def after_checkpoint(self, version: PolicyVersion) -> None:
        """A whole checkpoint of `version` is there."""
        self.ledger.checkpoint(version)

    async def close(self) -> None:
        """Stops what goes on behind the loop; what is unfinished stays held in the ledger."""
        for generator in self._generators.values():
            await generator.close()
        tasks = [t for t in (self._delivery, self._evaluation) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    self.say(f"{task.get_name()}: {error}")
        self.ledger.close()



__all__ = ["Flow", "Journal"]
