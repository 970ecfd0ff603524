"""Functions sent to the trainer's ranks: by value wherever the rank could not import them, with source and hash kept."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from milkweed.errors import ConfigError


class Shipped(msgspec.Struct, frozen=True):
    """A function on its way: its pickled bytes and what a run's record keeps of it."""

    name: str
    source: str
    sha256: str
    payload: bytes


def _installed(module: Any) -> bool:
    """Whether a rank can import `module` by itself: the standard library, an installed package, or ours."""
    if module.__name__.split(".")[0] in (sys.stdlib_module_names | {"milkweed"}):
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ != "__main__"
    roots = {Path(p).resolve() for p in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])}
    return any(root in Path(file).resolve().parents for root in roots)


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def ship(function: Callable[..., Any]) -> Shipped:
    """Pack `function` for the ranks. What it refers to in modules beside the script travels with it.

    Raises ConfigError where it cannot be pickled (it holds a lock, a file, a handle), naming it.
    """
    import cloudpickle

    inner = _unwrap(function)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    by_value = module is not None and module.__name__ != "__main__" and not _installed(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(f"function {name!r} cannot be sent to the trainer: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    source = _source(getattr(inner, "__code__", None) or type(inner)) or f"# the source of {name} is not available"
    return Shipped(name, source, hashlib.sha256(source.encode()).hexdigest(), payload)


@functools.lru_cache(maxsize=64)
def _source(where: Any) -> str:
    """The source of a code object or class; empty where there is none. Kept, since finding it takes milliseconds and a
    function that is defined anew has a code object of its own."""
    try:
        return textwrap.dedent(inspect.getsource(where))
    except (OSError, TypeError):
        return ""


@functools.lru_cache(maxsize=16)
def unship(payload: bytes) -> Callable[..., Any]:
    """The function in `payload`; the same bytes give the same object."""
    import pickle

    return pickle.loads(payload)
