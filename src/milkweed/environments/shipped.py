"""Functions and arguments as another process can load them."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import sysconfig
import time
from typing import Any

from milkweed.environments.children import KEPT
from milkweed.errors import RewardError
from milkweed.types import Prompt


def dumps(value: Any) -> bytes:
    """Plain pickle, several times as fast, wherever it does not refer to the script, which the child cannot import."""
    import cloudpickle

    try:
        if b"__main__" not in (plain := pickle.dumps(value, protocol=5)):
            return plain
    except (TypeError, AttributeError, pickle.PicklingError):
        pass  # what only cloudpickle can do, or nobody
    try:
        return cloudpickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise RewardError(f"reward arguments cannot be sent to another process: {error}") from error


_packed: dict[Any, tuple[float, str, bytes]] = {}


def packed(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bytes, bytes, str]:
    """A call as `Scorer.score_packed` takes it: the function's key and pickle, the pickled arguments, a label."""
    now, held = time.monotonic(), _packed.get(fn)
    if held is None or now - held[0] > 1.0:
        blob = dumps_function(fn)
        held = _packed[fn] = (now, hashlib.blake2b(blob, digest_size=16).hexdigest(), blob)
        while len(_packed) > KEPT:
            _packed.pop(next(iter(_packed)))
    return held[1], held[2], dumps((args, kwargs)), label(args)


def label(args: tuple[Any, ...]) -> str:
    return next((f"prompt {a.id}" for a in args if isinstance(a, Prompt)), "")


def dumps_function(fn: Any) -> bytes:
    """Pickle by value unless its module is installed: a script's neighbour need not be importable in the child, and
    a cell's function is what it is now."""
    import cloudpickle

    module = sys.modules.get(getattr(fn, "__module__", None) or type(fn).__module__)
    by_value = module is not None and module.__name__ != "__main__" and not _installed_module(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(fn)
    except Exception as error:  # whatever a closure holds may raise anything
        name = getattr(fn, "__name__", type(fn).__name__)
        raise RewardError(f"reward function {name} cannot be sent to another process: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _installed_module(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    if path is None or module.__name__.partition(".")[0] == "milkweed":
        return True  # built in, or ours
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(os.path.realpath(path).startswith(os.path.realpath(place) + os.sep) for place in places if place)
