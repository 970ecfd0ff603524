"""A live mesh: the trainer, the engines, the reward workers and the plane between them, held in one hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from milkweed.config import MeshConfig, load_mesh
from milkweed.errors import ConfigError, DataError
from milkweed.fleet import Fleet, Replica
from milkweed.fleet.memory import freeze, thaw
from milkweed.fleet.supervision import Event
from milkweed.runs.sampling import first_leaf
from milkweed.runs.weights import WeightPlane
from milkweed.training.model import VALUE_HEAD, Head, has_value_head
from milkweed.types import PolicyVersion

if TYPE_CHECKING:
    from milkweed.data import Chat
    from milkweed.environments import Scorer
    from milkweed.environments.workers import EnvironmentWorkers
    from milkweed.rollout import Router, Teacher
    from milkweed.runs.upkeep import Upkeep
    from milkweed.training import Trainer, TrainerConfig

T = TypeVar("T")
ROLES = ("trainer", "rollout", "reward")
DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "dtype", "threads")


async def whole(work: Awaitable[T]) -> T:
    """Await `work` so that being interrupted does not cut it in two: it is finished first, then the interrupt goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])  # every remote call inside has its deadline, so this ends
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() from None  # type: ignore[misc]
        raise


async def up(
    mesh: str | Path | MeshConfig = "local",
    *,
    model: str | Path,
    trainer: TrainerConfig | None = None,
    run_dir: str | Path | None = None,
    roles: Sequence[str] = ROLES,
    head: Head = "policy",
    reference: bool | str | Path = False,
    teacher: str | Path | None = None,
    critic: TrainerConfig | None = None,
    critic_model: str | Path | None = None,
    reward_model: str | Path | None = None,
    deterministic: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Mesh:
    """Bring a mesh up: processes started, the model folder loaded everywhere, ready to sample and train.

    `mesh` is a mesh file, the name of one that comes with Milkweed, or a MeshConfig. `roles` leaves out what a recipe
    has no use for. `head="value"` makes the trainer one of a reward model or critic, with a value head on `model`.

    Further models, each on its own processes with the degrees of its table in the mesh file (else the trainer's):
    `reference`, a frozen copy of `model`, or of the folder given (a teacher, say), whose tokenizer must be the same;
    `teacher`, the folder of one that is served by engines of its own (table [teacher], else as many as [rollout]);
    `critic`, the configuration of a value head trained on `critic_model` (default: `model`), whose checkpoints go to
    `run_dir`/critic; `reward_model`, the folder of a frozen one with a value head, as `head="value"` exports it.

    `deterministic` puts the engines into SGLang's mode of that name: a sample with a seed is then the same alone
    and in any company. Logs and checkpoints go to `run_dir`. `progress` hears what is being waited for. Raises
    ConfigError or DataError before any process starts where it can, FleetError where a process does not come up;
    nothing is left running then.
    """
    from milkweed.data import Chat
    from milkweed.training.config import TrainerConfig

    config = mesh if isinstance(mesh, MeshConfig) else load_mesh(mesh)
    if deterministic:
        engine = config.rollout.engine | {"enable_deterministic_inference": True}
        config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, engine=engine))
    unknown = set(roles) - set(ROLES)
    if unknown:
        raise ConfigError(f"roles: {', '.join(sorted(unknown))} is none of {', '.join(ROLES)}")
    settings = trainer or TrainerConfig()
    for key, given in (("trainer", settings), ("critic", critic)):
        own = [k for k in DEGREES if given is not None and getattr(given, k) != getattr(TrainerConfig(), k)]
        if own:
            raise ConfigError(f"{key}.{own[0]} is the mesh file's to say ({config.origin}, table [{key}]); leave it out of the recipe")
    if settings.decay != "none" and not settings.total_steps:
        raise ConfigError(f"trainer.decay is {settings.decay!r}: say trainer.total_steps, the step at which it ends")
    folder = Path(model).absolute()
    chat = await asyncio.to_thread(Chat, folder)
    frozen = folder if isinstance(reference, bool) else Path(reference).absolute()
    served = None if teacher is None else Path(teacher).absolute()
    judge = None if reward_model is None else Path(reward_model).absolute()
    baseline = folder if critic_model is None else Path(critic_model).absolute()
    others = {"reference": frozen, "teacher": served, "reward_model": judge, "critic": baseline}
    for role, other in others.items():
        if other not in (None, folder):
            chat.require_same_ids(await asyncio.to_thread(Chat, other), role)
    if judge is not None and not await asyncio.to_thread(has_value_head, judge):
        raise DataError(f"reward_model {judge}: has no value head ({VALUE_HEAD}); train one with head=\"value\" and export it")

    def degrees(role: str, of: TrainerConfig = settings) -> TrainerConfig:
        table = config.degrees(role)
        return msgspec.structs.replace(of, **{k: getattr(table, k) for k in DEGREES})

    progress(f"starting {config.hosts.count} host{'s' * (config.hosts.count > 1)} of mesh {config.name}")
    fleet = await Fleet.start(config, run_dir)
    live = Mesh(config, fleet, folder, chat)
    waiting = {r for r in roles} | {
        role
        for role, wanted in (("reference", reference), ("teacher", served), ("critic", critic), ("reward_model", judge))
        if wanted
    }

    async def bring(role: str, work: Awaitable[Any]) -> Any:
        result = await work
        waiting.discard(role)
        progress(f"waiting for {', '.join(sorted(waiting))}" if waiting else "")
        return result

    async def policies() -> None:
        from milkweed.training import Trainer

        if "trainer" in roles:
            start = Trainer.start(fleet, folder, degrees("trainer"), run_dir=run_dir, head=head)
            live.trainer = await bring("trainer", start)
        if reference:
            start = Trainer.start(fleet, frozen, degrees("reference"), role="reference", optimise=False)
            live.reference = await bring("reference", start)
        if critic is not None:
            place = Path(run_dir) / "critic" if run_dir else None
            start = Trainer.start(fleet, baseline, degrees("critic", critic), run_dir=place, role="critic", head="value")
            live.critic = await bring("critic", start)
        if judge is not None:
            start = Trainer.start(fleet, judge, degrees("reward_model"), role="reward_model", optimise=False, head="value")
            live.reward_model = await bring("reward_model", start)

    async def engines() -> None:
        from milkweed.rollout import Router

        live.rollout = await bring("rollout", Router.spawn(fleet, str(folder)))
        if "trainer" in roles:
            from milkweed.transfer.puller_actor import PullerActor

            spawns = (fleet.spawn("puller", h.index, PullerActor, fleet.token, f"puller{h.index}", host=h.index) for h in fleet.hosts)
            live.pullers = list(await asyncio.gather(*spawns))

    async def teachers() -> None:
        from milkweed.rollout import Router, Teacher

        live.teacher = Teacher(await bring("teacher", Router.spawn(fleet, str(served), role="teacher")))

    async def rewards() -> None:
        from milkweed.environments.actor import RewardActor
        from milkweed.environments.reward import Scorer

        async def workers() -> Scorer:
            count = range(config.reward.replicas)
            return Scorer(await asyncio.gather(*(fleet.spawn("reward", i, RewardActor) for i in count)))

        live.reward = await bring("reward", workers())

    async def environments() -> None:
        from milkweed.environments.actor import EnvironmentActor
        from milkweed.environments.workers import EnvironmentWorkers, setup_of

        count, setup = range(config.environment.replicas), setup_of(chat)
        spawns = (fleet.spawn("environment", i, EnvironmentActor, setup) for i in count)
        live.environment = EnvironmentWorkers(await asyncio.gather(*spawns))

    try:
        progress(f"waiting for {', '.join(sorted(waiting))}")
        async with asyncio.TaskGroup() as starting:
            starting.create_task(policies())
            if "rollout" in roles:
                starting.create_task(engines())
            if served is not None:
                starting.create_task(teachers())
            if "rollout" in roles and config.environment.replicas:
                starting.create_task(environments())
            if "reward" in roles:
                starting.create_task(rewards())
    except BaseException as error:
        await whole(live.down())
        raise (first_leaf(error) if isinstance(error, BaseExceptionGroup) else error) from None
    await fleet.end_unclaimed()
    live.supervise()
    if live.weights is not None and any(getattr(r, "adopted", False) for r in fleet.replicas):
        try:
            await live.publish()  # engines of a former life hold what its trainer had
        except BaseException:
            await whole(live.down())
            raise
    freeze()
    return live


class Mesh:
    """What `up` returns. `trainer`, `rollout`, `reward`, `reference`, `teacher`, `critic`, `reward_model`, `environment` are
    None where the mesh has no such role."""

    def __init__(self, config: MeshConfig, fleet: Fleet, model: Path, chat: Chat) -> None:
        self.config, self.fleet, self.model, self.chat = config, fleet, model, chat
        self.trainer: Trainer | None = None
        self.reference: Trainer | None = None
        self.teacher: Teacher | None = None
        self.critic: Trainer | None = None
        self.reward_model: Trainer | None = None
        self.rollout: Router | None = None
        self.reward: Scorer | None = None
        self.environment: EnvironmentWorkers | None = None
        self.pullers: list[Replica] = []
        self.weights: WeightPlane | None = None
        self.upkeep: Upkeep | None = None
        self.on_fault: Callable[[Event], None] = lambda event: None
        """Hears of what failed and what came in its place."""
        self.faults: list[Event] = []
        self.update_deadline_s = 120.0

    async def publish(self, offered: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Give every engine the trainer's weights: publish, pull, verify, commit. Whole or not at all for each engine.

        Returns the seconds of each part, measured in the processes that did it, and `bytes`. Raises TransferError
        where no engine got them; one that failed alone serves nothing until a later update succeeds. `offered` is
        called when the trainer is free to train on, which it may do while the weights are under way.
        """
        if self.trainer is None or self.rollout is None:
            raise ConfigError("publish needs the roles trainer and rollout in the mesh")
        return await whole(self._publish(offered))

    async def _publish(self, offered: Callable[[], None]) -> dict[str, float]:
        assert self.weights is not None
        return await self.weights.update(offered, self.update_deadline_s)

    def supervise(self) -> None:
        """From here on what fails is replaced. `up` calls it once everything serves."""
        from milkweed.runs.upkeep import Upkeep

        for policy in (self.trainer, self.reference, self.critic, self.reward_model):
            if policy is not None and policy.history is not None:
                policy.history.note = self._fault
        router = self.rollout
        if router is None:
            return
        if self.trainer is not None:
            engines = lambda: [e.replica for e in router.crew.living]  # noqa: E731
            self.weights = WeightPlane(self.trainer, router, self.pullers, engines, self.config.transfer)  # type: ignore[arg-type]
        from milkweed.environments.workers import setup_of

        self.upkeep = Upkeep(
            self.fleet, router, self.pullers, self.weights, self.reward, note=self._fault, budget=self.config.faults,
            deadline_s=self.update_deadline_s, teacher=self.teacher.router if self.teacher is not None else None,
            environment=self.environment, environment_setup=setup_of(self.chat),
        )  # fmt: skip

    def _fault(self, event: Event) -> None:
        self.faults.append(event)
        self.on_fault(event)

    @property
    def version(self) -> PolicyVersion:
        """The trainer's version."""
        assert self.trainer is not None
        return self.trainer.version

    async def down(self) -> None:
        """End every process of the mesh and give back what it held. Safe to call twice."""
        for part in (self.upkeep, self.weights, self.environment, self.rollout, self.teacher, self.reward):
            if part is not None:
                await part.close()
        await self.fleet.stop()
        thaw()

    async def __aenter__(self) -> Mesh:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.down()
