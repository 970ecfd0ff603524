"""The other end of `served.py`: a process that answers calls on a Unix socket, so that it can outlive its controller.

Run as `python -m milkweed.fleet.serving SOCKET TARGET PAYLOAD`: TARGET is `module:Class`, an object of which is made from the
bytes of the file PAYLOAD. Its public coroutine methods can be called; `forsaken` is, when a controller has gone. One
controller at a time; it names the run's token first.

A frame is its length in four bytes, then MessagePack: [number, method, arguments] in, [number, well, value] out. What was
raised travels as a pickle and its text: both ends are processes of one run, and the socket lies in a folder of its user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import pickle
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

MOST_BYTES = 1 << 30


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Raises IncompleteReadError where the other end has gone."""
    size = int.from_bytes(await reader.readexactly(4))
    if size > MOST_BYTES:
        raise asyncio.IncompleteReadError(b"", size)
    return msgspec.msgpack.decode(await reader.readexactly(size))


def frame(value: Any) -> bytes:
    raw = msgspec.msgpack.encode(value)
    return len(raw).to_bytes(4) + raw


async def serve(path: str, token: str, service: Any) -> None:
    """Until the process ends."""
    turn = asyncio.Lock()
    current: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter, number: int, name: str, arguments: list[Any]) -> None:
        try:
            if name.startswith("_"):
                raise AttributeError(f"{name} is not for callers")
            reply = [number, True, await getattr(service, name)(*arguments)]
        except (Exception, asyncio.CancelledError) as error:  # whatever it is, it is the caller's to judge
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            try:
                raw = pickle.dumps(error)
            except Exception:
                raw = b""
            reply = [number, False, [text, raw]]
        with contextlib.suppress(OSError):
            writer.write(frame(reply))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work: set[asyncio.Task[None]] = set()
        try:
            hello = await read_frame(reader)
            if not isinstance(hello, str) or not hmac.compare_digest(hello.encode(), token.encode()):
                return
            for old in current:
                old.close()
            async with turn:  # the one before has been forsaken
                current.append(writer)
                writer.write(frame("welcome"))
                try:
                    while True:
                        number, name, arguments = await read_frame(reader)
                        task = asyncio.create_task(answer(writer, number, name, arguments))
                        work.add(task)
                        task.add_done_callback(work.discard)
                finally:
                    current.remove(writer)
                    for task in work:
                        task.cancel()
                    await service.forsaken()
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            pass  # the other end has gone, or is none of ours
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, path)
    async with server:
        await server.serve_forever()


def main(argv: list[str]) -> None:
    path, target, payload = argv
    import faulthandler

    from milkweed.fleet.replica_main import name_semaphores

    faulthandler.enable()
    token = os.environ["MILKWEED_TOKEN"]
    name_semaphores(token)
    module, _, name = target.partition(":")
    service = getattr(import_module(module), name)(Path(payload).read_bytes())
    asyncio.run(serve(path, token, service))


if __name__ == "__main__":
    main(sys.argv[1:])
