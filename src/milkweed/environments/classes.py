"""Environments with turns: the tool-using one that is ready made, and gyms (`reset`, `step`, `close`) as functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from milkweed.environments.aside import aside
from milkweed.environments.conversation import Conversation, Limits
from milkweed.environments.reward import Reward, current
from milkweed.errors import ConfigError, RewardError
from milkweed.types import Environment, Prompt, Sampling, Trajectory


def tool_use(
    reward: Reward,
    tools: Sequence[Any],
    *,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    deadline_s: float | None = None,
    history: Literal["split", "keep"] = "split",
    announce: bool = True,
) -> Environment:
    """An environment of many turns: tools are run until the policy answers without calling one, or a limit is met;
    then `reward(prompt, text of the last turn)` is run outside the controller.

    A reward with a parameter `trajectory` also gets the trajectory. The parts it returns are joined by `tool_calls` and
    `malformed`, counts. Where it fails the trajectory is dropped with the reason (see `single_turn`).
    """
    wants = _parameters(reward)

    async def environment(prompt: Prompt, policy: Any) -> Trajectory:
        talk: Conversation = policy.talk(
            prompt.messages,
            tools=tools,
            limits=limits or Limits(turns=8),
            sampling=sampling,
            history=history,
            announce=announce,
        )
        async for reply in talk:
            await talk.run_tools(reply)
        trajectory = talk.trajectory()
        if trajectory.dropped is not None:
            return trajectory
        text = talk.replies[-1].text
        extra = {"trajectory": trajectory} if "trajectory" in wants else {}
        try:
            score, parts = await current(policy).score(reward, prompt, text, deadline_s=deadline_s, **extra)
        except RewardError as error:
            trajectory.dropped = str(error)
            return trajectory
        counts = {
            "tool_calls": float(sum(len(r.tool_calls) for r in talk.replies)),
            "malformed": float(sum(bool(r.errors) for r in talk.replies)),
        }
        trajectory.reward, trajectory.reward_parts = score, parts | counts
        return trajectory

    environment.__name__ = environment.__qualname__ = f"tool_use({getattr(reward, '__name__', 'reward')})"
    return environment


def _parameters(fn: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # some callables written in C have none
        return frozenset()


def is_gym(env: Any) -> bool:
    """Whether `env` is a class or an object with `reset` and `step`."""
    return callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))


def from_gym(
    make: Any,
    *,
    system: str = "",
    limits: Limits | None = None,
    tools: Sequence[Any] = (),
    sampling: Sampling | None = None,
    action: Callable[[str], Any] = lambda text: text,
    history: Literal["split", "keep"] = "split",
) -> Environment:
    """An environment from a class with `reset`, `step` and `close`, plain or async, a new object for each trajectory.

    `make` is the class or a function that makes one; it is given the task where it takes an argument, and so is
    `reset`. `reset` returns the first observation, or (observation, info). `step(action)` returns (observation, reward,
    done), or gymnasium's (observation, reward, terminated, truncated, info). An observation is text (a user's message),
    a message, or a list of messages; None after the last step. `action` makes of the reply's text what `step` takes;
    where it raises ValueError the policy is told, and no step is made. Each step's
    reward belongs to its turn, and their sum is the trajectory's. The task's own messages stand before the first
    observation; plain methods run in a thread, so that one that hangs is given up at the deadline; tools are run before
    `step` sees a reply. Attributes `system`, `limits` and `tools` of the object stand for arguments that are not given.
    """

    async def environment(prompt: Prompt, policy: Any) -> Trajectory:
        gym = await _call(make, prompt) if callable(make) else make
        if not is_gym(gym):
            raise ConfigError(f"{make!r} has no reset and step")
        try:
            first = await _call(gym.reset, prompt)
            told = system or getattr(gym, "system", "")
            opening = [{"role": "system", "content": told}] if told else []
            talk: Conversation = policy.talk(
                [*opening, *prompt.messages, *_messages(first[0] if isinstance(first, tuple) else first)],
                tools=tools or getattr(gym, "tools", ()),
                limits=limits or getattr(gym, "limits", None) or Limits(turns=32),
                sampling=sampling,
                history=history,
            )
            done = False
            async for reply in talk:
                if talk.finish is None and await talk.run_tools(reply):
                    continue
                if talk.finish not in (None, "length", "tokens"):
                    break  # cut short by a fault: no action of the policy's
                try:
                    move = action(reply.text)
                except ValueError as error:
                    talk.add(f"error: {error}")  # no move at all: to be read, not a fault of the gym
                    continue
                observation, reward, done = _outcome(await _call(gym.step, move))
                talk.reward(reward)
                if done:
                    break
                talk.add(*_messages(observation))
            trajectory = talk.trajectory(reward=0.0)
            trajectory.reward_parts = {"done": float(done)}
            return trajectory
        finally:
            close = getattr(gym, "close", None)
            if close is not None:
                await _call(close)

    environment.__name__ = environment.__qualname__ = f"from_gym({getattr(make, '__name__', type(make).__name__)})"
    return environment


def as_environment(env: Any) -> Environment:
    """`env` as the loop takes it: a function stays, a class with `reset` and `step` goes through `from_gym`."""
    if is_gym(env):
        if not inspect.isclass(env):
            raise ConfigError(
                f"{type(env).__name__}: give the class (or from_gym(function that makes one)): each trajectory needs its own object"
            )
        return from_gym(env)
    return env


async def _call(fn: Any, *arguments: Any) -> Any:
    """`fn` with as many of `arguments` as it takes, awaited where it is async."""
    try:
        parameters = inspect.signature(fn).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = [p for p in parameters if p.kind in kinds]
        room = len(arguments) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
        if fn is not None and arguments and isinstance(arguments[0], Prompt):
            # gymnasium's reset(seed=..., options=...) and classes with settings of their own do not take a task
            names = {p.name for p in places if p.default is p.empty} | {
                p.name for p in places if p.name in ("task", "prompt")
            }
            room = min(room, len(names))
    except (TypeError, ValueError):
        room = 0
    if inspect.iscoroutinefunction(fn):
        return await fn(*arguments[:room])
    value = await aside(fn, *arguments[:room])
    return await value if inspect.isawaitable(value) else value


def _messages(observation: Any) -> list[dict[str, Any]]:
    if observation is None:
        return []
    if isinstance(observation, dict) and "role" in observation:
        return [observation]
    if isinstance(observation, (list, tuple)) and all(isinstance(m, dict) and "role" in m for m in observation):
        return list(observation)
    return [{"role": "user", "content": str(observation)}]


def _outcome(value: Any) -> tuple[Any, float, bool]:
    if not isinstance(value, (tuple, list)) or len(value) not in (3, 4, 5):
        raise ConfigError(
            f"step returned {str(value)[:80]}; it must return (observation, reward, done) or gymnasium's five values"
        )
    done = value[2] or value[3] if len(value) == 5 else value[2]
    return value[0], float(value[1]), bool(done)
