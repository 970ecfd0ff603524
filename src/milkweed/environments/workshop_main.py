"""The process in which environments run: an event loop with many trajectories. Started by path from `workshop.py`."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any


def main() -> None:
    reader, writer, parent, memory = map(int, sys.argv[1:5])
    from milkweed.environments import sandbox

    sandbox.fork_guarded(parent)
    os.set_inheritable(reader, False)
    os.set_inheritable(writer, False)
    sandbox.limit(core=0, data=4 * memory)  # a last resort: the keeper looks at what is resident
    asyncio.run(Shop(writer).serve(reader))


class Shop:
    """The trajectories of this process. `ask` brings a question to the controller and waits for the answer."""

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._environments: dict[str, Any] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._calls = itertools.count(1)
        self._chat: Any = None
        self._stained = False

    async def serve(self, pipe: int) -> None:
        reader = asyncio.StreamReader(limit=1 << 30)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb"))
        beating = loop.create_task(self._beat())
        try:
            while True:
                size = struct.unpack("<I", await reader.readexactly(4))[0]
                self._obey(*pickle.loads(await reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            os._exit(0)  # the keeper is gone
        finally:
            beating.cancel()

    def _obey(self, kind: str, *rest: Any) -> None:
        if kind == "run":
            id, key, blob, _ = rest
            self._running[id] = asyncio.get_running_loop().create_task(self._run(id, key, blob))
        elif kind == "reply":
            id, call, blob = rest
            future = self._answers.pop((id, call), None)
            if future is not None and not future.done():
                good, value = pickle.loads(blob)
                future.set_result(value) if good else future.set_exception(value)
        elif kind == "cancel":
            task = self._running.get(rest[0])
            if task is not None:
                task.cancel()
        elif kind == "function":
            key, blob = rest
            try:
                self._environments[key] = pickle.loads(blob)
            except BaseException as error:
                self._environments[key] = error
        elif kind == "setup" and rest[0]:
            from milkweed.data.tokenizer import Chat

            folder, template, options = pickle.loads(rest[0])
            self._chat = Chat(folder, template=template, **options)

    async def _beat(self) -> None:
        from milkweed.environments.workshop import Beat

        while True:
            self.send(Beat(self._stained))
            await asyncio.sleep(1.0)

    def send(self, event: Any) -> None:
        from milkweed.environments.workshop import encode_event

        data = encode_event(event)
        data = struct.pack("<I", len(data)) + data
        while data:
            data = data[os.write(self._writer, data) :]

    async def ask(self, id: int, **question: Any) -> Any:
        from milkweed.environments.workshop import Ask

        call = next(self._calls)
        future = self._answers[id, call] = asyncio.get_running_loop().create_future()
        self.send(Ask(id, call, **question))
        try:
            return await future
        finally:
            self._answers.pop((id, call), None)

    async def _run(self, id: int, key: str, blob: bytes) -> None:
        from milkweed.environments.reward import use
        from milkweed.environments.workshop import Done
        from milkweed.runs.sampling import Handle
        from milkweed.types import Trajectory

        done = Done(id)
        try:
            environment = self._environments[key]
            if isinstance(environment, BaseException):
                raise RuntimeError(f"it could not be loaded in its process: {environment!r}") from environment
            prompt, sampling = pickle.loads(blob)
            policy = Handle(_Router(self, id), sampling, "", _Scorer(self, id), self._chat)
            try:
                with use(policy.scorer):
                    made = await environment(prompt, policy)
            finally:
                await policy.close()
            done.several = not isinstance(made, Trajectory)
            done.trajectories = list(made) if done.several else [made]
            self.send(done)
            return
        except asyncio.CancelledError:
            done.error = "CancelledError"
            self._watch_for_stains()
        except BaseException as error:  # SystemExit too: the environment's, not ours
            done.trajectories = []
            done.error, done.text = type(error).__name__, _said(error)
        finally:
            self._running.pop(id, None)
        self.send(done)

    def _watch_for_stains(self) -> None:
        """A plain function that a cancelled trajectory waited for cannot be stopped; its thread stays."""
        left = [t for t in threading.enumerate() if t.name.startswith("aside")]

        def look() -> None:
            self._stained = self._stained or any(t.is_alive() for t in left)

        asyncio.get_running_loop().call_later(1.0, look)


class _Router:
    """What a `Handle` samples from: the controller's own handle of this trajectory."""

    def __init__(self, shop: Shop, id: int) -> None:
        self._shop, self._id = shop, id

    async def sample(self, token_ids: Sequence[int], sampling: Any, **_: Any) -> Any:
        return await self._shop.ask(self._id, token_ids=list(token_ids), sampling=sampling)


class _Scorer:
    """What rewards are scored on: the mesh's reward workers, by way of the controller."""

    def __init__(self, shop: Shop, id: int) -> None:
        self._shop, self._id = shop, id

    async def score(self, fn: Any, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        from milkweed.environments.reward import Score
        from milkweed.environments.shipped import packed

        key, blob, payload, label = packed(fn, args, kwargs)
        question = {"key": key, "blob": blob, "payload": payload, "label": label, "deadline_s": deadline_s}
        return Score(*await self._shop.ask(self._id, **question))


def _said(error: BaseException) -> str:
    from milkweed.errors import MilkweedError

    if isinstance(error, MilkweedError):
        return str(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{error}{where}"


if __name__ == "__main__":
    main()
