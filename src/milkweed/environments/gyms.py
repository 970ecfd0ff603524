"""Other people's gyms by thin adapters: gymnasium's text environments, skyrl-gym, verifiers. The packages are optional.
Those behind a server are in `servers.py`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from milkweed.environments.classes import from_gym
from milkweed.errors import ConfigError, RewardError
from milkweed.types import Environment, Prompt


def gymnasium_env(
    make: str | Callable[[], Any],
    *,
    action: Callable[[str], Any],
    describe: Callable[[Any], str] = str,
    **options: Any,
) -> Environment:
    """A gymnasium environment: its name, or a function that makes it. `describe` writes an observation down, `action`
    reads one from what the policy said (ValueError for what is none). The task's `info["seed"]` seeds the reset.
    `options` are those of `from_gym`. Raises ConfigError where the package is missing or the name unknown."""

    def fresh() -> Any:
        if callable(make):
            return make()
        gymnasium = _package("gymnasium")
        try:
            return gymnasium.make(make)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium has no environment {make!r}: {error}") from error

    class Adapter:
        def __init__(self) -> None:
            self.gym = fresh()

        def reset(self, task: Prompt) -> str:
            observation, _ = self.gym.reset(seed=task.info.get("seed"))
            return describe(observation)

        def step(self, move: Any) -> tuple[str, float, bool]:
            observation, reward, terminated, truncated, _ = self.gym.step(move)
            return describe(observation), float(reward), bool(terminated or truncated)

        def close(self) -> None:
            self.gym.close()

    Adapter.__name__ = make if isinstance(make, str) else getattr(make, "__name__", "gymnasium")
    return from_gym(Adapter, action=action, **options)


def skyrl_env(name: str, *, config: dict[str, Any] | None = None, **options: Any) -> Environment:
    """A skyrl-gym environment by its id. The task's `info["extras"]` are its extras; without them its answer is the
    ground truth. `options` are those of `from_gym`. Raises ConfigError where the package is missing or the id
    unknown."""
    skyrl = _package("skyrl_gym")
    if name not in skyrl.registry:
        raise ConfigError(f"skyrl-gym has no environment {name!r}; it has {', '.join(sorted(skyrl.registry))}")

    class Adapter:
        def reset(self, task: Prompt) -> list[dict[str, Any]]:
            extras = task.info.get("extras") or {
                "reward_spec": {"ground_truth": task.answer},
                "extra_info": {},
                "max_turns": 5,
            }
            self.gym = skyrl.make(name, env_config=config or {}, extras=extras)
            opening, _ = self.gym.init(task.messages)
            return opening[len(task.messages) :]

        def step(self, text: str) -> tuple[list[dict[str, Any]], float, bool]:
            out = self.gym.step(text)
            return out["observations"], float(out["reward"]), bool(out["done"])

        def close(self) -> None:
            self.gym.close()

    Adapter.__name__ = f"skyrl {name}"
    return from_gym(Adapter, **options)


def verifiers_env(env: Any, gateway: Any, **options: Any) -> Environment:
    """An environment of verifiers (its `Environment`, a function that makes one, or the name `load_environment` knows),
    which samples through `gateway`. Prompts are those of `verifiers_prompts`; `options` are those of
    `gateway.environment`.

    Its own rubric scores each trajectory, its metrics are the reward's parts. A reward function that raises, which
    verifiers counts as 0, drops the trajectory instead. Raises ConfigError for rubrics that score whole groups.
    """
    made = _verifiers(env)
    rubrics = _rubrics(made.rubric)
    if any(r._is_group_func(f) for r in rubrics for f in r.funcs):
        raise ConfigError("verifiers_env: the rubric has functions that score a whole group; score one trajectory each")
    for rubric in rubrics:
        rubric.funcs = [_telling(f) for f in rubric.funcs]

    async def play(task: Prompt, base_url: str, api_key: str) -> tuple[float, dict[str, float]]:
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            state = await made.rollout(dict(task.info["verifiers"]), client, gateway.model, {})
        failures: list[Exception] = []
        token = _failures.set(failures)
        try:
            extra = {"score_sem": contextlib.nullcontext()} if _takes(made.rubric.score_rollout, "score_sem") else {}
            # not every rubric waits for a semaphore
            await made.rubric.score_rollout(state, **extra)
        finally:
            _failures.reset(token)
        if failures:
            raise RewardError(f"reward raised {type(failures[0]).__name__}: {failures[0]} (prompt {task.id})")
        return float(state["reward"]), {k: float(v) for k, v in (state["metrics"] or {}).items()}

    environment: Environment = gateway.environment(play, **options)
    environment.__name__ = f"verifiers({getattr(made, 'env_id', '') or type(made).__name__})"  # type: ignore[attr-defined]
    return environment


def verifiers_prompts(env: Any, *, held_out: bool = False) -> list[Prompt]:
    """The tasks of an environment of verifiers: its training set, or the one it is evaluated on."""
    made = _verifiers(env)
    rows = made.get_eval_dataset() if held_out else made.get_dataset()
    return [
        Prompt(id=str(r["example_id"]), messages=r["prompt"], answer=r.get("answer"), info={"verifiers": dict(r)})
        for r in rows
    ]


_failures: ContextVar[list[Exception] | None] = ContextVar("milkweed_verifiers_failures", default=None)


def _telling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which tells what it raised before verifiers makes a 0 of it."""
    if hasattr(fn, "milkweed_telling"):
        return fn

    @functools.wraps(fn)
    async def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            value = fn(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            if (failures := _failures.get()) is not None:
                failures.append(error)
            raise

    telling.milkweed_telling = True  # type: ignore[attr-defined]
    return telling


def _rubrics(rubric: Any) -> list[Any]:
    return [r for inner in rubric.rubrics for r in _rubrics(inner)] if hasattr(rubric, "rubrics") else [rubric]


def _takes(fn: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(fn).parameters


def _verifiers(env: Any) -> Any:
    if isinstance(env, str) or not hasattr(env, "rollout"):
        with _signals_kept():
            return _package("verifiers").load_environment(env) if isinstance(env, str) else env()
    return env


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Its environments take Ctrl-C and SIGTERM for themselves when they are made; those are the controller's."""
    kept = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs the package {name.replace('_', '-')}: pip install {name.replace('_', '-')}"
        ) from error
