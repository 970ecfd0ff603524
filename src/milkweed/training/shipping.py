"""Functions sent to the trainer's ranks: by value wherever the rank could not import them, with source and hash kept."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import msgspec

from milkweed.errors import ConfigError
from milkweed.training.sources import Part, installed, parts, source_text, unwrap


class Shipped(msgspec.Struct, frozen=True):
    """A function on its way: its pickled bytes and what a run's record keeps of it. `parts` are the sources of it and
    of all it calls; `sha256` is over them and the plain values it holds."""

    name: str
    source: str
    sha256: str
    payload: bytes
    parts: list[Part] = []


_known: dict[bytes, tuple[list[Part], str]] = {}


def ship(function: Callable[..., Any]) -> Shipped:
    """Pack `function` for the ranks. What it refers to in modules beside the script travels with it.

    Raises ConfigError where it cannot be pickled (it holds a lock, a file, a handle), naming it.
    """
    import cloudpickle

    inner = unwrap(function)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    by_value = module is not None and module.__name__ != "__main__" and not installed(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(f"function {name!r} cannot be sent to the trainer: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if payload not in _known:  # the same bytes are the same function, holding the same values
        if len(_known) >= 64:
            _known.clear()
        _known[payload] = parts(function)
    made_of, digest = _known[payload]
    source = made_of[0].source if made_of and made_of[0].name == name else source_text(function)
    return Shipped(name, textwrap.dedent(source), digest, payload, made_of)


@functools.lru_cache(maxsize=16)
def unship(payload: bytes) -> Callable[..., Any]:
    """The function in `payload`; the same bytes give the same object."""
    import pickle

    return pickle.loads(payload)
