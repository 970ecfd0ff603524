"""What one agent did through the gateway: its calls as token-exact trajectories, and the reward it was given."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from milkweed.data.tokenizer import Chat
from milkweed.environments.conversation import Limits, Message, Reply
from milkweed.environments.threads import Threads
from milkweed.errors import DataError, EnvironmentFailed
from milkweed.types import Completion, Sampling, Trajectory


class Session:
    """The calls made with one key. `base_url` and `key` are what an OpenAI client needs: `OpenAI(base_url=s.base_url,
    api_key=s.key)`. Calls that go on from each other are one sequence of tokens, others are segments of one trajectory.
    """

    def __init__(
        self,
        base_url: str,
        chat: Chat,
        policy: Any,
        sampling: Sampling,
        *,
        limits: Limits | None,
        fixed: bool,
        announce: bool = True,
    ) -> None:
        self.id, self.key, self.base_url = secrets.token_hex(8), f"sk-mw-{secrets.token_hex(24)}", base_url
        self.sampling, self.fixed = sampling, fixed
        self.calls, self.used = 0, time.monotonic()
        self.failure: BaseException | None = None
        """What the engines failed at, if they did: the agent may have hidden it."""
        self._threads = Threads(chat, policy.sample, sampling, limits=limits, announce=announce)
        self._rewarded: asyncio.Future[tuple[float, dict[str, float]]] = asyncio.get_running_loop().create_future()

    async def chat(self, messages: Sequence[Message], tools: Sequence[Any], sampling: Sampling) -> Reply:
        return await self._threads.chat(messages, tools=tools, sampling=sampling)

    async def complete(self, token_ids: list[int], sampling: Sampling) -> Completion:
        return await self._threads.complete(token_ids, sampling)

    def reward(self, value: float, parts: dict[str, float] | None = None) -> None:
        """Scores the session; a later reward takes the place of an earlier one until it is read. Raises DataError where
        it is no finite number."""
        numbers = [value, *(parts or {}).values()]
        if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in numbers):
            raise DataError(f"a reward must be a finite number (and parts finite numbers), not {str(value)[:40]}")
        if self._rewarded.done():
            self._rewarded = self._rewarded.get_loop().create_future()
        self._rewarded.set_result((float(value), {k: float(v) for k, v in (parts or {}).items()}))

    async def scored(self, deadline_s: float = 600.0) -> Trajectory:
        """The trajectory, once somebody has posted its reward. Raises EnvironmentFailed where nobody does in time."""
        try:
            async with asyncio.timeout(deadline_s):
                value, parts = await asyncio.shield(self._rewarded)
        except TimeoutError:
            raise EnvironmentFailed(f"session {self.id}: no reward was posted within {deadline_s:g} s") from None
        return self.trajectory(value, parts)

    @property
    def given(self) -> tuple[float, dict[str, float]] | None:
        """The reward that was posted, if one was."""
        return self._rewarded.result() if self._rewarded.done() else None

    def trajectory(self, reward: float | None = None, parts: dict[str, float] | None = None) -> Trajectory:
        """What was sampled, scored with `reward` (default: the one that was posted). Raises DataError where the agent
        called nothing, and again what the engines raised where the agent hid it."""
        if self.failure is not None:
            raise self.failure
        if reward is None and self.given is not None:
            reward, parts = self.given
        return self._threads.trajectory(reward, parts)
