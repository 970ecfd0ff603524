"""Other people's blocking code, run where it can hang without holding up the loop or the controller's end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`fn(*args, **kwargs)` in a daemon thread of its own. When the caller stops waiting the thread is left to itself:
    a pool would be joined at the end, and one call that never returns would be the end that never comes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(fn, *args, **kwargs)
        except StopIteration as stop:
            error = RuntimeError(
                f"{getattr(fn, '__name__', 'the call')} raised StopIteration: {stop}"
            )  # no future takes it
        except BaseException as raised:  # told to who waits
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=work, name=f"aside {getattr(fn, '__name__', '')}", daemon=True).start()
    return await future
