"""Other people's gyms by thin adapters: gymnasium's text environments and skyrl-gym. Both packages are optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milkweed.environments.classes import from_gym
from milkweed.errors import ConfigError
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


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs the package {name.replace('_', '-')}: pip install {name.replace('_', '-')}"
        ) from error
