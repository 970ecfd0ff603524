"""A run: the steps of one recipe over one mesh, with its directory, its metrics, its checkpoints and its view.

A step begins with `sample`, trains with `train` and ends with `publish`, which hands the weights to the engines and
writes the step down. `steps()` counts them, resumes where a former life stopped, and checkpoints on the way.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from milkweed.errors import ConfigError, DataError, MilkweedError
from milkweed.fleet.memory import freeze
from milkweed.observe.trained import TrainedLogprobs
from milkweed.observe.view import View
from milkweed.runs.config import RunConfig
from milkweed.runs.directory import INVOCATION, RunDirectory, default_directory
from milkweed.runs.flow import Flow
from milkweed.runs.mesh import ROLES, Mesh, up, whole
from milkweed.runs.rows import Rows
from milkweed.runs.sampling import sample_groups
from milkweed.runs.saving import Saving
from milkweed.types import Batch, Environment, Group, Loss, Prompt, Sampling

if TYPE_CHECKING:
    import torch

    from milkweed.data import PromptStream

Advantages = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class Run:
    """Made by `start`. Holds the mesh (`mesh`), the step reached (`step`) and everything written down."""

    def __init__(self, config: RunConfig, directory: RunDirectory, mesh: Mesh, view: View) -> None:
        self.config, self.directory, self.mesh, self.view = config, directory, mesh, view
        self.held_out: list[tuple[int, float]] = []
        self.state: dict[str, Any] = {}
        """The recipe's own; what JSON can say. Kept in the checkpoints, so that a resumed run finds it as it was."""
        self.resumed = False
        self._streams: dict[str, PromptStream] = {}
        self._saved: dict[str, Any] = {}
        self._began = time.monotonic()
        self._spent_before = 0.0
        self._flow: Flow | None = None
        self._saving = Saving(mesh, view, self._kept)
        self._rows: Any = None  # Rows, once it is open
        self._trained = TrainedLogprobs(directory.path, config.keep_tokens_steps)

    # ---- what a recipe calls

    @property
    def step(self) -> int:
        """Optimiser steps applied so far."""
        return self.mesh.version.step

    def stream(self, prompts: Sequence[Prompt], name: str = "train") -> PromptStream:
        """`prompts` as an endless shuffled stream whose position is kept in the checkpoints. Prompts are rendered with
        the model's chat template. Raises DataError where a resumed run's data is not what it was."""
        from milkweed.data import PromptStream

        stream = PromptStream(self.render(prompts), seed=self.config.seed)
        if name in self._saved.get("streams", {}):
            stream.restore(self._saved["streams"][name])
        if self._flow is not None:
            self._flow.place(stream, name)
        self._streams[name] = stream
        return stream

    def render(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """`prompts` with `token_ids` filled by the model's chat template."""
        return self.mesh.chat.render(prompts)

    async def steps(self) -> AsyncIterator[int]:
        """The numbers of the steps still to do, 1 being the first. Each must train; a checkpoint is written every
        `checkpoint_every` steps and after the last."""
        freeze()  # the prompts above all
        while self.step < self.config.steps:
            before = self.step
            yield before + 1
            if self.step == before:
                raise MilkweedError(f"step {before + 1} ended without training: call run.train and run.publish in every step")
            every = self.config.checkpoint_every
            if self.step // every > before // every or self.step >= self.config.steps:
                await self.checkpoint(wait=self.step >= self.config.steps)
            else:
                await self._saving.look()

    async def sample(
        self,
        env: Environment,
        prompts: PromptStream | Sequence[Prompt],
        groups: int | None = None,
        *,
        n: int,
        sampling: Sampling | None = None,
        keep: Callable[[Group], bool] | None = None,
    ) -> list[Group]:
        """Groups of `n` scored trajectories each, to train on next: of the next `groups` prompts of a stream, or of each
        prompt of a list.

        From a stream they are made ahead as far as `config.staleness` lets, go on from where a killed run was, and are
        handed out oldest first; groups that `keep` says no to are replaced by others. From a list they are sampled now,
        at staleness 0 only. Raises DataError where not one trajectory could be scored, with the reasons.
        """
        if self.mesh.rollout is None or self._flow is None:
            raise ConfigError("sampling needs the roles trainer and rollout in the mesh")
        name = next((k for k, s in self._streams.items() if s is prompts), None)
        if (name is None) != (groups is None):
            raise ConfigError("run.sample takes a stream made by run.stream and the number of groups, or a list of prompts alone")
        if name is None and (self.config.staleness or keep is not None):
            raise ConfigError("a list of prompts cannot be sampled ahead or refilled: give run.sample the stream and the number of groups")
        began, busy, reward_busy = time.monotonic(), self.mesh.rollout.busy_s, self.mesh.reward.busy_s if self.mesh.reward else 0.0
        self.view.status("")
        if name is not None:
            made = await self._flow.take(env, prompts, name, groups=groups, samples=n, sampling=sampling or self.config.sampling, keep=keep)  # type: ignore[arg-type]
        else:
            if self.mesh.rollout.version != self.mesh.version:
                await self._flow.publish()  # an interrupted step may have trained without publishing
            made = await self._sample_list(env, prompts, n, sampling or self.config.sampling, str(self.mesh.version))  # type: ignore[arg-type]
            self._flow.listed(made)
        self._begin_row(made, began, busy, reward_busy)
        return made

    async def _sample_list(self, env: Environment, prompts: Sequence[Prompt], n: int, sampling: Sampling, key: str) -> list[Group]:
        return await sample_groups(
            env,
            prompts if all(p.token_ids for p in prompts) else self.render(prompts),
            self.mesh.rollout,
            scorer=self.mesh.reward,
            chat=self.mesh.chat,
            workers=self.mesh.environment,
            samples=n,
            sampling=sampling,
            key=key,
            seed=self.config.seed,
            deadline_s=self.config.trajectory_deadline_s,
            deterministic=self.config.deterministic,
        )

    def _begin_row(self, groups: list[Group], began: float, busy: float, reward_busy: float) -> None:
        assert self.mesh.rollout is not None and self._flow is not None
        reward = 0.0
        if self.mesh.reward is not None:  # what was scored while engines still sampled is their time, not the scorers'
            alone = self.mesh.reward.idle_at - self.mesh.rollout.idle_at
            reward = min(self.mesh.reward.busy_s - reward_busy, max(0.0, alone))
        self._rows.sampled(self.step + 1, groups, began, self.mesh.rollout.busy_s - busy, reward, self._flow.metrics(), self.mesh.rollout.kv)

    async def train(self, batch: Batch, loss: Loss, *, role: Literal["trainer", "critic"] = "trainer") -> dict[str, float]:
        """One optimiser step of the policy (or the critic), whole or not at all, also when interrupted. Returns its
        metrics; the critic's stand under `critic` in the step's row."""
        model = self.mesh.critic if role == "critic" else self.mesh.trainer
        if model is None:
            raise ConfigError(f"training needs the role {role} in the mesh")
        before, own = self.step, model.version
        try:
            metrics = await whole(model.update(batch, loss))
        finally:  # an interrupted step may have been applied
            if self._flow is not None and self.step > before:
                self._flow.trained(self.mesh.version)
            if self._flow is not None and model.version != own:
                self._flow.updated(model, batch)
            if role == "trainer" and self._flow is not None and self.step > before and model.trained is not None:
                self._trained.write(self.step, batch, model.trained)
        self._rows.trained(metrics, role)
        return metrics

    async def publish(self) -> dict[str, Any]:
        """Gives every engine the new weights and ends the step: its row of metrics is written and shown. Returns it."""
        update = await self._flow.publish() if self._flow is not None and self.mesh.rollout is not None else {}
        return self.log(update)

    def log(self, update: dict[str, float] | None = None) -> dict[str, Any]:
        """Writes the step's row; `publish` does it for recipes that have engines."""
        return self._rows.end(self.mesh.version, update or {})

    def note(self, **numbers: float) -> None:
        """Writes further numbers of the current step into the metrics, and says them."""
        self._rows.note(self.step, numbers)
        self.view.say(f"step {self.step}: " + ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in numbers.items()))

    async def evaluate(self, env: Environment, prompts: Sequence[Prompt], *, n: int = 1, sampling: Sampling | None = None) -> float | None:
        """Mean reward of `n` trajectories of each held-out prompt under the current weights; nothing of it is trained.

        With staleness above 0 it goes on beside the next steps, under the weights that the engines have by then got, and
        None is returned; `held_out` and the metrics have the result in time, under its own step. A trajectory that could
        not be scored counts as a miss here, so that dropping cannot raise the number.
        """
        assert self.mesh.rollout is not None and self._flow is not None
        if self.held_out and self.held_out[-1][0] == self.step:
            return self.held_out[-1][1]
        if not self._flow.behind:
            if self.mesh.rollout.version != self.mesh.version:
                await self._flow.publish()
            return await self._evaluate(env, prompts, n, sampling, self.step)
        await self._flow.evaluated()
        await self._flow.delivered()
        self._flow.evaluate(self._evaluate(env, prompts, n, sampling, self.mesh.rollout.version.step))
        return None

    async def _evaluate(self, env: Environment, prompts: Sequence[Prompt], n: int, sampling: Sampling | None, step: int) -> float:
        if self._flow is not None and not self._flow.behind:
            self.view.status(f"evaluating {len(prompts)} held-out prompts")
        began = time.monotonic()
        groups = await self._sample_list(env, prompts, n, sampling or self.config.sampling, f"eval-{step}")
        rewards = [t.reward if t.dropped is None and t.reward is not None else 0.0 for g in groups for t in g.trajectories]
        mean = sum(rewards) / len(rewards)
        self.held_out.append((step, mean))
        self.view.status("")
        self._rows.held_out(step, groups, mean, len(rewards), time.monotonic() - began)
        return mean

    async def checkpoint(self, *, wait: bool = True) -> None:
        """Writes a checkpoint: parameters, optimiser, schedule, and where the data and the schedule of evaluation stand.
        Without `wait` it is written while the run goes on; it counts once it is whole."""
        self.view.status(f"writing checkpoint {self.step}")
        await self._saving.write(wait=wait)
        self.view.status("")

    def _kept(self) -> dict[str, Any]:
        """What goes into a checkpoint beside the weights."""
        return {
            "streams": {name: s.state() for name, s in self._streams.items()},
            "held_out": self.held_out,
            "recipe": self.state,
            "spent_s": self.spent_s,
        }

    @property
    def spent_s(self) -> float:
        """Seconds the run has taken, those of its former lives included."""
        return self._spent_before + time.monotonic() - self._began

    def summary(self) -> str:
        """`held-out reward A -> B in N steps, T min`, or what there is of it."""
        minutes = f"{self.spent_s / 60:.1f} min"
        if len(self.held_out) < 2:
            return f"{self.step} steps, {minutes}"
        return f"held-out reward {self.held_out[0][1]:.3f} -> {self.held_out[-1][1]:.3f} in {self.step} steps, {minutes}"

    # ---- life

    @classmethod
    async def open(
        cls,
        config: RunConfig,
        *,
        model: str | Path,
        roles: Sequence[str] = ROLES,
        view: View | None = None,
        **models: Any,
    ) -> Run:
        """Open the run directory, bring the mesh up, and resume if there is something to resume. End it with `close`.

        `models` (`head`, `reference`, `critic`, `critic_model`, `reward_model`) are those of `up`.

        `config.run_dir` names the directory (default: a new one under `runs/`). Raises RunLocked where another
        controller holds it, ConfigError for a configuration that is wrong or not the one the run began with; nothing
        is left running or locked then.
        """
        recipe, arguments = INVOCATION.get()
        directory = RunDirectory(
            config.run_dir or default_directory(recipe),
            recipe=recipe,
            arguments=arguments,
            config=msgspec.to_builtins(config) | {"model": str(Path(model).absolute())},
            allow_changes=config.allow_changes,
        )
        trainer = config.trainer
        if trainer.decay != "none" and not trainer.total_steps:
            trainer = msgspec.structs.replace(trainer, total_steps=max(config.steps, trainer.warmup_steps + 1))
        view = view or View(f"{Path(recipe).stem}  {directory.path.name}", config.steps)
        view.__enter__()
        run = None
        try:
            view.say(f"run directory {directory.path}")
            mesh = await up(
                config.mesh,
                model=model,
                trainer=trainer,
                run_dir=directory.path,
                roles=roles,
                deterministic=config.deterministic,
                **models,
                progress=view.status,
            )
            for text in mesh.fleet.said:
                view.say(text)
            run = cls(config, directory, mesh, view)
            await run._open()
            return run
        except BaseException:
            if run is not None:
                await run._abandon()
            view.__exit__(None, None, None)
            directory.discard()
            raise

    async def _open(self) -> None:
        resumed_at = None
        life = self.directory.begin_life()
        if self.directory.existed and self.mesh.trainer is not None:
            saved = await self.mesh.trainer.load(life)
            resumed_at = 0
            for step, why in self.mesh.trainer.broken.items():
                self.view.say(f"checkpoint {step} cannot be read and is passed over: {why}")
            if saved is not None:
                self._saved, self.resumed, resumed_at = saved, True, self.step
                self.held_out = [(int(s), float(r)) for s, r in saved.get("held_out", [])]
                self.state = saved.get("recipe", {})
                self._spent_before = float(saved.get("spent_s", 0.0))
                if self.mesh.critic is not None:
                    await self._resume_critic(saved.get("critic"))
                self.view.say(f"resumed from checkpoint {self.step} of {self.directory.path}")
        path = self.directory.path
        self._rows = Rows(self.config, path, self.view, resumed_at=resumed_at, record=self.directory.record.config)
        self.mesh.on_fault = lambda event: self._rows.fault(self.step, event)
        if self.mesh.trainer is not None:
            self._flow = self._saving.flow = Flow(self.config, path, self.mesh, self.view.say)
            if self.mesh.weights is not None:
                self.mesh.weights.served = self._flow.served
            self._flow.resume(self.mesh.version, same=not self.directory.changed)
            self._flow.describe([self.mesh.trainer, self.mesh.critic])
        if self.mesh.rollout is not None and self.mesh.trainer is not None:
            self.view.status("giving the engines the trainer's weights")
            await self.mesh.publish()
        self.view.status("")

    async def _resume_critic(self, step: int | None) -> None:
        """The critic as it was at the policy's checkpoint."""
        assert self.mesh.critic is not None
        if step is None or await self.mesh.critic.load(step=step) is None:
            where = self.directory.path / "critic" / "checkpoints"
            raise DataError(f"the policy's checkpoint {self.step} goes with the critic's {step}, which {where} does not hold")

    async def close(self) -> None:
        """Take the mesh down and give up the directory; the last line says what came of the run."""
        if self._flow is not None:
            await self._flow.evaluated()
        await self._saving.written()
        self.view.status("taking the mesh down")
        await self._close()
        self.view.status("")
        self.view.__exit__(None, None, None)
        self.view.say(self.summary())
        self.directory.close()

    async def _close(self) -> None:
        try:
            try:  # however the run ends, what is being written is finished
                await self._saving.written(60.0)
            except MilkweedError as error:
                self.view.say(f"the checkpoint of {self._saving.under_way} is not whole: {error}")
            if self._flow is not None:
                await whole(self._flow.close())
        finally:
            await self._take_down()

    async def _take_down(self) -> None:
        try:
            await whole(self.mesh.down())
        finally:
            if self._rows is not None:
                self._rows.close()
            self._trained.close()

    async def _abandon(self) -> None:
        """`_close` for a run that ends by an exception: what else goes wrong is said, and does not take its place."""
        try:
            await self._close()
        except (MilkweedError, OSError) as error:
            self.view.say(f"while the run was ended: {error}")


@asynccontextmanager
async def start(config: RunConfig, **options: Any) -> AsyncIterator[Run]:
    """`Run.open` for `async with`: the mesh is taken down at the end of the block, however it ends."""
    run = await Run.open(config, **options)
    try:
        yield run
    except BaseException:
        await run._abandon()
        run.view.__exit__(None, None, None)
        run.directory.close()
        raise
    await run.close()
