"""The process that runs reward functions: reads calls from a pipe, answers on another, ends when it is told or killed.

Run by path, never imported by the package (`children.py` starts it), so it costs an interpreter and no more: what a
reward function needs is imported when the function arrives.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import struct
import sys
import traceback
from typing import Any


def main() -> None:
    reader, writer, parent, memory, processes, namespace = map(int, sys.argv[1:7])
    # by path: importing the package would cost more than the rest of the start
    spec = importlib.util.spec_from_file_location(
        "_milkweed_sandbox", os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.py")
    )
    assert spec is not None and spec.loader is not None
    sandbox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    isolated = bool(sandbox.fork_guarded(parent, isolate=bool(namespace)))
    os.set_inheritable(reader, False)
    os.set_inheritable(writer, False)
    sandbox.limit(core=0, **({"data": memory} if memory else {}))
    if os.geteuid() != 0 and isolated:
        sandbox.limit(nproc=processes)  # counted inside the namespace alone
    serve(io.FileIO(reader, "r"), writer, isolated)


def serve(reader: io.FileIO, writer: int, isolated: bool) -> None:
    """Answer until the pipe ends."""
    functions: dict[str, Any] = {}
    send(writer, ("hello", isolated))
    while True:
        message = receive(reader)
        if message is None:
            os._exit(0)
        kind, *rest = message
        if kind == "path":
            sys.path[:] = list(dict.fromkeys([*rest[0], *sys.path]))
            continue
        if kind == "function":
            key, blob, dropped = rest
            functions.pop(dropped, None)
            try:
                function = pickle.loads(blob)
                prepare = getattr(function, "prepare", None)
                if callable(prepare):
                    prepare()
            except BaseException as error:
                send(writer, ("error", f"could not be loaded: {_name(error)}", _trace()))
                continue
            functions[key] = function
            send(writer, ("loaded",))
        elif kind == "score":
            key, blob = rest
            send(writer, score(functions[key], blob))


def score(function: Any, blob: bytes) -> tuple[Any, ...]:
    """("result", reward, parts) or ("error", what happened, traceback)."""
    try:
        args, kwargs = pickle.loads(blob)
    except BaseException as error:
        return ("error", f"got arguments that could not be loaded: {_name(error)}", _trace())
    try:
        value = function(*args, **kwargs)
        if hasattr(value, "__await__"):
            import asyncio

            async def wait(value: Any) -> Any:
                return await value

            value = asyncio.run(wait(value))
        reward, parts = number(value)
    except NotANumber as error:
        return ("error", str(error), "")
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function's, not ours
        return ("error", f"raised {_name(error)}", _trace())
    return ("result", reward, parts)


class NotANumber(Exception):
    pass


def number(value: Any) -> tuple[float, dict[str, float]]:
    """The reward and its parts of what a function returned: a finite number, or a mapping of finite numbers whose
    `reward` is the reward; without that key their sum is."""
    if isinstance(value, dict):
        if not value:
            raise NotANumber("returned an empty dict")
        parts = {str(k): _finite(v, f" in {k!r}") for k, v in value.items()}
        if "reward" in parts:
            return parts.pop("reward"), parts
        return sum(parts.values()), parts
    return _finite(value, ""), {}


def _finite(value: Any, where: str) -> float:
    if value is None or isinstance(value, (str, bytes)):
        raise NotANumber(f"returned {value!r:.60}{where}, not a number")
    try:
        out = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise NotANumber(f"returned a {type(value).__name__}{where}, not a number") from None
    if out != out or out in (float("inf"), float("-inf")):
        raise NotANumber(f"returned {out}{where}, not a finite number")
    return out


def _name(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename != __file__]
    where = f" ({frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception as second:
        text = f"<its message raised {type(second).__name__}>"
    return f"{type(error).__name__}: {text[:500]}{where}"


def _trace() -> str:
    return traceback.format_exc(limit=-8)[-4000:]


def send(writer: int, message: tuple[Any, ...]) -> None:
    data = pickle.dumps(message, 5)
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(writer, data) :]


def receive(reader: io.FileIO) -> tuple[Any, ...] | None:
    head = _exactly(reader, 4)
    body = None if head is None else _exactly(reader, struct.unpack("<I", head)[0])
    return None if body is None else pickle.loads(body)


def _exactly(reader: io.FileIO, n: int) -> bytes | None:
    data = b""
    while len(data) < n:
        part = reader.read(n - len(data))
        if not part:
            return None
        data += part
    return data


if __name__ == "__main__":
    main()
