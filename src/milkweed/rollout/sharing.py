"""Which of an engine's waiting requests should wait for another's prefill: those that begin as it does.

SGLang's prefix cache knows a prompt only once it has been computed. Samples of a group arrive together, and each would
compute the whole prompt; held back until the first has, they find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

BLOCK = 32
"""Tokens compared together."""
WORTH = 64
"""Fewer tokens saved than this are not worth one more pass of the model."""
LEADERS = 4
"""As many requests one waits for, one after the other; a cache that keeps nothing must not line them all up."""


def held_back(waiting: Sequence[Any], computing: Iterable[Any], saved: Callable[[Any, int], int]) -> list[Any]:
    """Of the requests in `waiting`, in their order, those to be left for a later batch, because one of `computing`, or one
    before them that is not left, begins as they do. A request has `rid`, `origin_input_ids` (an array), and `extra_key` and
    `cache_salt`, which KV depends on as well; `saved(request, n)` tells how many tokens fewer it would compute with its
    first n in the cache."""
    paths: dict[Any, Any] = {}
    for request in computing:
        _add(paths, request)
    left = []
    for request in waiting:
        leader, shared = _common(paths, request)
        waited = request.__dict__.setdefault("_milkweed_waited", [])
        may = leader is not None and shared >= WORTH and (leader in waited or len(waited) < LEADERS)
        if not may or saved(request, shared) < WORTH:
            _add(paths, request)
            continue
        left.append(request)
        if leader not in waited:
            waited.append(leader)
    return left


def _path(request: Any) -> list[Any]:
    """What KV of the prompt's blocks depends on: the request's keys, then the blocks."""
    ids, keys = request.origin_input_ids, (request.extra_key, request.cache_salt)
    path = getattr(request, "_milkweed_path", None)
    if path is None or path[0] != keys:
        raw, size = ids.tobytes(), BLOCK * ids.itemsize
        path = [keys, *(raw[start : start + size] for start in range(0, len(raw) - size + 1, size))]
        request._milkweed_path = path
    return path


def _add(paths: dict[Any, Any], request: Any) -> None:
    for block in _path(request):
        _, paths = paths.setdefault(block, (request.rid, {}))


def _common(paths: dict[Any, Any], request: Any) -> tuple[str | None, int]:
    """Who has as many blocks at the beginning as any in `paths`, and how many tokens those are."""
    leader, count = None, 0
    for block in _path(request):
        if block not in paths:
            break
        leader, paths = paths[block]
        count += 1
    return leader, max(count - 1, 0) * BLOCK
