"""Runs a recipe as a script: arguments into its configuration, errors into one clear line, Ctrl-C into a clean end."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

from milkweed import config as configuration
from milkweed.errors import MilkweedError
from milkweed.runs.directory import INVOCATION

C = TypeVar("C")
T = TypeVar("T")


def main(recipe: Callable[[C], Awaitable[Any]], config: type[C], argv: Sequence[str] | None = None) -> None:
    """Parse `argv` (default: the command line) into `config`, run `recipe` with it, and exit: 0 when it ended well,
    1 for an error that Milkweed explains, 2 for wrong arguments, 130 for Ctrl-C. `--help` lists every key."""
    leave(_main(recipe, config, list(sys.argv[1:] if argv is None else argv)))


def leave(status: int) -> NoReturn:
    """End the process now, exit handlers done, without tearing the interpreter down. A thread of Monarch's (0.7.0) that
    wants the interpreter while it is torn down is killed by Python 3.11 in a way that aborts the process (status 134)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main(recipe: Callable[[C], Awaitable[Any]], config: type[C], arguments: list[str]) -> int:
    try:
        settings = configuration.from_args(config, arguments)
    except MilkweedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    INVOCATION.set((os.path.abspath(sys.argv[0]), arguments))
    try:
        asyncio.run(_as_coroutine(recipe(settings)))
    except KeyboardInterrupt:
        print("interrupted; what the last checkpoint holds is kept: go on with `milkweed run DIR`", file=sys.stderr)
        return 130
    except MilkweedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_sync(work: Awaitable[T]) -> T:
    """Run one coroutine to its end, for scripts that want no `await`. Raises RuntimeError inside a running loop (a
    notebook): write `await` there."""
    return asyncio.run(_as_coroutine(work))


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work

