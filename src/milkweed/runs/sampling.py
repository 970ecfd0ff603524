"""Prompts in, groups of scored trajectories out: runs an environment many times beside each other."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from milkweed.environments.classes import as_environment
from milkweed.environments.conversation import Conversation, Limits, Reply
from milkweed.environments.threads import Threads
from milkweed.environments.workers import Raised
from milkweed.errors import ConfigError, DataError, EnvironmentFailed, FleetError, MilkweedError
from milkweed.types import Completion, Environment, Group, Policy, Prompt, Sampling, Trajectory


class Handle:
    """The policy as an environment sees it. `name` says in errors whose samples they are; `scorer` is what rewards are
    run on; `template` is the model's `Chat`; `seeds` gives the seed of the n-th sample, for deterministic sampling; `workers` run the environment (None: here)."""

    def __init__(
        self,
        router: Any,
        sampling: Sampling,
        name: str,
        scorer: Any = None,
        template: Any = None,
        seeds: Callable[[int], int] | None = None,
        workers: Any = None,
    ):
        self._router, self._sampling, self._name, self.scorer, self._template = router, sampling, name, scorer, template
        self._seeds, self._asked = seeds, itertools.count()
        self.workers = workers
        self._threads: dict[str, Threads] = {}
        self._talks: list[Conversation] = []

    @property
    def sampling(self) -> Sampling:
        """How completions are sampled where a call does not say."""
        return self._sampling

    async def sample(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """One completion of `token_ids`. Raises DataError for a prompt that does not fit the context, FleetError
        when no engine is left, DeadlineExceeded when none answered in time."""
        return await self._router.sample(token_ids, self._seeded(sampling), name=self._name)

    def _seeded(self, sampling: Sampling | None) -> Sampling:
        sampling = sampling or self._sampling
        if self._seeds is None or sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=self._seeds(next(self._asked)))

    async def chat(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[Any] = (), sampling: Sampling | None = None, agent: str = ""
    ) -> Reply:
        """The next message after `messages`, which may hold earlier replies (`reply.message`): those stand with the
        ids that were sampled. `trajectory` gives what came of all calls. Raises as `sample` does."""
        threads = self._threads.get(agent)
        if threads is None:
            threads = self._threads[agent] = Threads(self._known_template(), self.sample, self._sampling, agent=agent)
        return await threads.chat(messages, tools=tools, sampling=sampling)

    def trajectory(self, reward: float | None = None, parts: dict[str, float] | None = None, *, agent: str = "") -> Trajectory:
        """What was sampled by `chat` (of the player `agent`), scored with `reward`."""
        if agent not in self._threads:
            raise DataError(f"no trajectory{f' of {agent}' if agent else ''}: policy.chat was not called for it")
        return self._threads[agent].trajectory(reward, parts)

    def talk(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Any] = (),
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        agent: str = "",
        history: Any = "split",
        announce: bool = True,
    ) -> Conversation:
        """A conversation that begins with `messages`: turns, tools, limits and the trajectory in one hand."""
        talk = Conversation(
            self._known_template(),
            self.sample,
            messages,
            tools=tools,
            limits=limits,
            sampling=sampling or self._sampling,
            agent=agent,
            history=history,
            announce=announce,
        )
        self._talks.append(talk)
        return talk

    async def close(self) -> None:
        """Ends what tools hold for this trajectory."""
        for talk in self._talks:
            await talk.close()

    def _known_template(self) -> Any:
        if self._template is None:
            raise ConfigError("messages need the model's chat template: pass chat=Chat(model folder) to sample_groups")
        return self._template


def seeds(seed: int, group: str, sample: int) -> Callable[[int], int]:
    """The seed of each turn of a sample, from those of the run, the group and the sample."""
    return lambda turn: int.from_bytes(hashlib.blake2b(f"{seed}/{group}/{sample}/{turn}".encode(), digest_size=6).digest())


def failed(reason: str, prompt: Prompt, sampling: Sampling) -> Trajectory:
    """A trajectory that never came to be: nothing to train, and a reason that is counted."""
    return Trajectory(
        token_ids=list(prompt.token_ids),
        loss_mask=[False] * len(prompt.token_ids),
        logprobs=[0.0] * len(prompt.token_ids),
        versions=[],
        turns=[],
        finish_reason="error",
        sampling=sampling,
        error=reason,
        dropped=reason,
    )


async def sample_one(
    env: Environment, prompt: Prompt, handle: Policy, group: str, index: int, *, sampling: Sampling, seed: int, deadline_s: float
) -> Trajectory:
    """`sample_players` for an environment of one player."""
    several = await sample_players(env, prompt, lambda: handle, group, index, sampling=sampling, seed=seed, deadline_s=deadline_s)
    if len(several) == 1:
        return several[0]
    names = ", ".join(t.agent or "?" for t in several)
    return _named(failed(f"data: the environment has several players ({names}), and one trajectory was asked for", prompt, sampling), prompt, group, index, seed)


async def sample_players(
    env: Environment | type,
    prompt: Prompt,
    handle: Callable[[], Policy],
    group: str,
    index: int,
    *,
    sampling: Sampling,
    seed: int,
    deadline_s: float,
    retries: int = 1,
    again: bool = False,
) -> list[Trajectory]:
    """Sample `index` of `group`: the trajectory of each player, its identity filled in. Where the environment fails by its
    own fault (EnvironmentFailed) it is tried again with a new handle, `retries` times; where it fails otherwise, or passes
    `deadline_s`, one trajectory comes back, dropped with its reason. `again` says that it was tried before: in a worker it then runs alone.
    FleetError is raised."""
    run = as_environment(env)

    async def attempt(alone: bool) -> list[Trajectory]:
        policy = handle()
        try:
            workers = getattr(policy, "workers", None)
            if workers is None or getattr(run, "in_controller", False):
                made = await run(prompt, policy)
            else:
                made = await workers.run(run, prompt, policy, alone=alone)
        finally:
            if isinstance(policy, Handle):
                await policy.close()
        several = [made] if isinstance(made, Trajectory) else list(made)
        names = [t.agent for t in several if isinstance(t, Trajectory)]
        if not names or len(set(names)) < len(several):
            raise DataError(f"the environment must return a trajectory, or several of different agents, not {str(made)[:80]}")
        return several

    try:
        async with asyncio.timeout(deadline_s):
            for left in reversed(range(retries + 1)):
                try:
                    several = await attempt(again or left < retries)
                    break
                except EnvironmentFailed:
                    if not left:
                        raise
    except DataError as error:
        several = [failed(f"data: {error}", prompt, sampling)]
    except (FleetError, asyncio.CancelledError):
        raise
    except TimeoutError:
        several = [failed(f"environment passed its deadline of {deadline_s:g} s ({prompt.id})", prompt, sampling)]
    except MilkweedError as error:
        several = [failed(f"{type(error).__name__}: {error}", prompt, sampling)]
    except Raised as error:
        several = [failed(f"environment raised {error} (prompt {prompt.id})", prompt, sampling)]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"environment raised {type(error).__name__}: {error} ({where.name}, line {where.lineno}; prompt {prompt.id})"
        several = [failed(reason, prompt, sampling)]
    return [_named(t, prompt, group, index, seed) for t in several]


def _named(trajectory: Trajectory, prompt: Prompt, group: str, index: int, seed: int) -> Trajectory:
    """Identity, and the reason where nothing else says why it has no reward."""
    name = f"{group}#{trajectory.agent}" if trajectory.agent else group
    label = int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=6).digest())
    for t in trajectory.sequences:
        t.id, t.index, t.prompt_id, t.group_id, t.seed = f"{name}/{index}", index, prompt.id, name, label
    if trajectory.reward is None and trajectory.dropped is None:
        trajectory.dropped = "the environment gave no reward"
    return trajectory


async def sample_groups(
    env: Environment | type,
    prompts: Sequence[Prompt],
    router: Any,
    *,
    scorer: Any = None,
    chat: Any = None,
    workers: Any = None,
    samples: int,
    sampling: Sampling,
    key: str,
    seed: int = 0,
    deadline_s: float = 600.0,
    retries: int = 1,
    deterministic: bool = False,
) -> list[Group]:
    """`samples` trajectories of every prompt, as groups in the order of `prompts`. An environment that returns several
    trajectories gives a group for each of its players (`agent`), the group's id ending in `#agent`.

    `workers` (EnvironmentWorkers) run the environments; without them they run in this process.

    `key` (a run's step, say) makes group ids unique: `key/prompt id`. A trajectory whose environment raises, or passes
    `deadline_s`, comes back dropped with its reason; the others are not touched. A lost fleet is raised: with no
    engine left there is nothing to go on with. `deterministic` draws each sample from a seed of its own, made of `seed`,
    group, index and turn; the engines must be in deterministic mode.
    """

    def handle(group: str, index: int) -> Handle:
        drawn = seeds(seed, group, index) if deterministic else None
        return Handle(router, sampling, f"{group}/{index}", scorer, chat, drawn, workers)

    async def one(p: Prompt, g: str, i: int) -> list[Trajectory]:
        return await sample_players(
            env, p, lambda: handle(g, i), g, i, sampling=sampling, seed=seed, deadline_s=deadline_s, retries=retries
        )

    named = [(prompt, f"{key}/{prompt.id}") for prompt in prompts]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [[tasks.create_task(one(p, g, i)) for i in range(samples)] for p, g in named]
    except* FleetError as lost:
        raise first_leaf(lost) from None  # every waiter was told the same: one error says it
    groups = []
    for (prompt, _), row in zip(named, running):
        players: dict[str, list[Trajectory]] = {}
        for t in (t for task in row for t in task.result()):
            players.setdefault(t.group_id, []).append(t)
        groups += [Group(id=name, prompt=prompt, trajectories=ts) for name, ts in players.items()]
    return groups


def first_leaf(group: BaseExceptionGroup) -> BaseException:
    """The first error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def drops(groups: Sequence[Group]) -> dict[str, int]:
    """How many trajectories were dropped for which reason (what stands before the first colon or bracket)."""
    counts: dict[str, int] = {}
    for group in groups:
        for t in group.trajectories:
            if t.dropped is not None:
                reason = t.dropped.split(":")[0].split("(")[0].strip()
                counts[reason] = counts.get(reason, 0) + 1
    return counts
