"""A replica that is one process of the keeper's own, called over a Unix socket: such a one can outlive its controller."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from pathlib import Path
from typing import Any

from milkweed.errors import DeadlineExceeded, PeerDied, RemoteError
from milkweed.fleet.replica import Replica
from milkweed.fleet.serving import frame, read_frame


class Served(Replica):
    """Called as any replica is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.adopted = False
        """It had another controller before."""
        self._numbers = itertools.count()
        self._waits: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @staticmethod
    def place(folder: Path, uid: str) -> Path:
        """Its socket."""
        return folder / f"{uid}.sock"

    async def connect(self, path: Path, token: str, deadline_s: float) -> None:
        """Returns when its object has been made. Raises PeerDied or DeadlineExceeded (kind `refused`)."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            self._check()
            try:
                async with asyncio.timeout_at(end):
                    reader, self._writer = await asyncio.open_unix_connection(str(path))
                    self._writer.write(frame(token))
                    await read_frame(reader)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if loop.time() > end:
                    raise DeadlineExceeded(self.name, "refused", f"it did not come up in {deadline_s:g} s; see {self.log}") from None
                await asyncio.sleep(0.05)
            except TimeoutError:
                raise DeadlineExceeded(self.name, "refused", f"it did not answer in {deadline_s:g} s; see {self.log}") from None
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise PeerDied(self.name, "refused", f"it refused this controller; its log is {self.log}") from error
        self._reading = asyncio.create_task(self._read(reader), name=f"answers of {self.name}")

    async def call(self, endpoint: str, *args: Any, deadline_s: float, **kwargs: Any) -> list[Any]:
        return [await self.call_one(endpoint, *args, deadline_s=deadline_s, **kwargs)]

    async def stop(self, deadline_s: float = 5.0) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        await super().stop(deadline_s)

    def _send(self, mesh: Any, how: str, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        self._check()
        assert self._writer is not None and not kwargs, "calls over a socket have no keywords"
        answer, number = asyncio.get_running_loop().create_future(), next(self._numbers)
        self._waits[number] = answer
        answer.add_done_callback(lambda _: self._waits.pop(number, None))
        self._writer.write(frame([number, endpoint, list(args)]))
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, well, value = await read_frame(reader)
                answer = self._waits.get(number)
                if answer is None or answer.done():
                    continue  # nobody waits for it any more
                if well:
                    answer.set_result(value)
                else:
                    answer.set_exception(self._raised(*value))
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.sleep(0.2)  # its keeper knows how it ended
            self.fail(self.died("it closed its connection"))

    def _raised(self, text: str, raw: bytes) -> RemoteError:
        error = RemoteError(self.name, "raised", text)
        if raw:
            try:
                error.__cause__ = pickle.loads(raw)
            except Exception as why:  # an exception that cannot be made again: its text has to do
                error.add_note(f"(its exception cannot be read here: {why!r})")
        return error
