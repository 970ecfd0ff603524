"""A reward by another model: an engine of the mesh, or any OpenAI-compatible endpoint, asked with a rubric."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from typing import Any, Protocol

from milkweed.errors import MilkweedError, RewardError
from milkweed.types import Prompt, Sampling

ASK = (
    "{rubric}\n\nTask:\n{task}\n\nAnswer:\n{answer}\n\nEnd with a line `Score: N`, N a number from {low:g} to {high:g}."
)
KEPT = 100_000


class Answers(Protocol):
    """What a judge asks: messages in, text out."""

    async def ask(self, messages: list[dict[str, Any]]) -> str: ...


class Endpoint:
    """A model behind an OpenAI-compatible API. `options` go into each request (`temperature=0`, `max_tokens=...`)."""

    def __init__(
        self, base_url: str, model: str, api_key: str = "", *, deadline_s: float = 60.0, **options: Any
    ) -> None:
        self.base_url, self.model, self.deadline_s = base_url.rstrip("/"), model, deadline_s
        self.options = {"temperature": 0.0} | options
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._clients: dict[Any, Any] = {}

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """The answer's text. Raises RewardError naming the endpoint and what it said."""
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            self._clients = {loop: httpx.AsyncClient(timeout=self.deadline_s, limits=httpx.Limits(max_connections=256))}
            client = self._clients[loop]
        body = {"model": self.model, "messages": messages} | self.options
        try:
            async with asyncio.timeout(self.deadline_s):
                response = await client.post(f"{self.base_url}/chat/completions", json=body, headers=self._headers)
        except (httpx.HTTPError, TimeoutError) as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RewardError(f"judge at {self.base_url} did not answer: {cause}") from error
        if response.status_code != 200:
            raise RewardError(f"judge at {self.base_url} answered {response.status_code}: {response.text[:300]}")
        try:
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RewardError(f"judge at {self.base_url} answered something else: {response.text[:300]}") from error


class Engines:
    """The engines of a mesh as a judge: `Engines(mesh.rollout, mesh.chat)`, sampled greedily."""

    def __init__(self, router: Any, chat: Any, sampling: Sampling | None = None) -> None:
        self._router, self._chat = router, chat
        self._sampling = sampling or Sampling(temperature=0.0, max_tokens=512)

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        completion = await self._router.sample(self._chat.ids(messages), self._sampling)
        return completion.text


class Judge:
    """`await judge(task, answer)`: a score from 0 (worst) to 1, by `model` under `rubric`.

    The model is asked again where it gave no score, or did not answer, `retries` times. `budget` bounds the questions
    in all; `at_once` those under way. The same answer to the same task is asked about once. `scale` is what the model
    is told to score by. Raises RewardError where there is no score: the sample is then dropped, not given a zero.
    """

    def __init__(
        self,
        model: Answers,
        rubric: str,
        *,
        scale: tuple[float, float] = (0.0, 10.0),
        retries: int = 2,
        budget: int | None = None,
        at_once: int = 32,
        ask: str = ASK,
    ) -> None:
        if not scale[0] < scale[1]:
            raise ValueError(f"scale must rise, not {scale}")
        self.model, self.rubric, self.scale, self.retries, self.budget, self._ask = (
            model,
            rubric,
            scale,
            retries,
            budget,
            ask,
        )
        self.asked = 0
        """Questions so far."""
        self._at_once = at_once
        self._gates: dict[Any, asyncio.Semaphore] = {}
        self._known: OrderedDict[bytes, asyncio.Future[float]] = OrderedDict()

    async def __call__(self, task: Prompt, answer: str) -> float:
        key = hashlib.blake2b(repr((self.rubric, task.messages, answer)).encode(), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None and (known.done() or known.get_loop() is asyncio.get_running_loop()):
            self._known.move_to_end(key)
            return await asyncio.shield(known)
        work = asyncio.ensure_future(self._judged(task, answer))
        self._known[key] = work
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        try:
            return await asyncio.shield(work)
        except RewardError:
            self._known.pop(key, None)  # another time it may answer
            raise

    async def _judged(self, task: Prompt, answer: str) -> float:
        loop, last = asyncio.get_running_loop(), ""
        if loop not in self._gates:
            self._gates = {loop: asyncio.Semaphore(self._at_once)}
        low, high = self.scale
        question = self._ask.format(rubric=self.rubric, task=task.text, answer=answer, low=low, high=high)
        for attempt in range(self.retries + 1):
            if self.budget is not None and self.asked >= self.budget:
                raise RewardError(f"judge: its budget of {self.budget} questions is used up (prompt {task.id})")
            self.asked += 1
            try:
                async with self._gates[loop]:
                    said = await self.model.ask([{"role": "user", "content": question}])
            except MilkweedError as error:
                last = str(error)
                await asyncio.sleep(min(0.2 * 2**attempt, 5.0))
                continue
            value = score_in(said)
            if value is not None and low <= value <= high:
                return (value - low) / (high - low)
            last = f"it gave no score from {low:g} to {high:g}: {said[-80:]!r}"
        raise RewardError(f"judge failed {self.retries + 1} times (prompt {task.id}): {last}")


def score_in(text: str) -> float | None:
    """The number after the last `Score:`."""
    found = re.findall(r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return float(found[-1]) if found else None
