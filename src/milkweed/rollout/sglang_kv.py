"""KV inside SGLang's schedulers: who computes a beginning that several have, and what an update leaves of it.

Read from SGLang 0.5.23. Where a tier of storage lies below an engine, requests carry the version as cache salt, which seeds
the keys of everything that is stored. It is given here, in the scheduler, since only the scheduler knows between which two
steps the version changes. At a commit what is on its way between the tiers is ended before the cache is flushed, and whoever
waits gets the new salt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from milkweed.types import PolicyVersion

SHARE = "MILKWEED_SHARE_PREFILL"
"""Where set, requests wait for others that compute what they begin with."""
TIER = "MILKWEED_KV_TIER"
"""Where set, a tier of storage lies below the engine."""
SETTLE = "milkweed_settle"
DRAIN_S = 5.0
"""What is on its way between the tiers at a commit must have ended after this."""


def register(registry: Any, kinds: Any) -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    if os.environ.get(SHARE):
        registry.register(f"{scheduler}.get_new_batch_prefill", shared_prefill, kinds.AROUND)
    if os.environ.get(TIER):
        registry.register(f"{scheduler}.handle_generate_request", _salted, kinds.AROUND)


def shared_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """The next prefill, without the requests for which another one computes a part now or first."""
    queue = scheduler.waiting_queue
    if len(queue) == 0 or running_batch.batch_is_full or not scheduler.tree_cache.supports_prefix_sharing():
        return original(scheduler, running_batch)
    from sglang.srt.mem_cache.common import match_kv_cache

    from milkweed.rollout.sharing import held_back

    def saved(request: Any, shared: int) -> int:
        usable = min(shared, request._compute_max_prefix_len(len(request.origin_input_ids)))
        if not usable:  # its prompt's log-probs are asked for
            return 0
        match_kv_cache(request, scheduler.tree_cache)
        return usable - request.prefix_len - request.host_hit_length

    # the last prefill's KV is in the tree once its result is processed, which may be after this
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    computing = list(last.reqs) if last is not None and last.forward_mode.is_extend() else []
    left = held_back(queue, computing + ([chunked] if chunked is not None else []), saved)
    if not left:
        return original(scheduler, running_batch)
    places = {id(request): place for place, request in enumerate(queue)}
    out = {id(request) for request in left}
    scheduler.waiting_queue = [request for request in queue if id(request) not in out]
    try:
        return original(scheduler, running_batch)
    finally:  # what came meanwhile (a request that made room) comes last
        both = [*scheduler.waiting_queue, *left]
        scheduler.waiting_queue = sorted(both, key=lambda request: places.get(id(request), len(places)))


def _salted(original: Callable[..., Any], scheduler: Any, request: Any, *rest: Any, **more: Any) -> Any:
    salt = getattr(scheduler, "_milkweed_salt", None)
    request.cache_salt = scheduler.server_args.weight_version if salt is None else salt
    return original(scheduler, request, *rest, **more)


class Still:
    """While it holds, nothing new goes between the tiers of `scheduler`: `begin` before requests are retracted, `drain`
    before the cache is flushed, `end` in any case. Where there is no tier below the engine it does nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        controller = scheduler.tree_cache.cache_controller
        self._cache = scheduler.tree_cache if controller is not None else None
        tier = controller.storage_backend if controller is not None else None
        self._pages = getattr(tier, "pages", None)

    def begin(self) -> None:
        if self._pages is not None:
            self._pages.closed = True  # what is being read is a miss now, what is to be written is discarded
            self.scheduler.enable_hicache_storage = False  # else requests that are retracted would be looked up

    def drain(self, agree: Callable[[str], str]) -> None:
        """Ends what is on its way; `agree` makes one answer of all ranks'. Raises RuntimeError after DRAIN_S seconds."""
        if self._cache is None:
            return
        end = time.monotonic() + DRAIN_S
        for request in self.scheduler.waiting_queue:
            self._cache.release_aborted_request(request.cache_request_handle)
        while left := agree(_on_its_way(self._cache)):
            if agree("late" if time.monotonic() > end else ""):
                raise RuntimeError(f"on its way between the tiers of KV is, after {DRAIN_S:g} s: {left}")
            self._cache.check_hicache_events()
            time.sleep(0.0005)

    def serve(self, version: str) -> None:
        """The weights are of `version` now and the cache is empty; requests that wait are of that version too."""
        if self._pages is None:
            return
        self.scheduler._milkweed_salt = version
        for request in self.scheduler.waiting_queue:
            request.cache_salt = version
        self._pages.serve(PolicyVersion.parse(version))

    def end(self) -> None:
        if self._pages is not None:
            self._pages.closed = False
            self.scheduler.enable_hicache_storage = True


def settle(scheduler: Any, agree: Callable[[str], str], within_s: float) -> str:
    """Drives what is to be written below the engine until it is there, for `within_s` seconds at most. Nothing else runs
    meanwhile. Returns what is missing."""
    cache, end = scheduler.tree_cache, time.monotonic() + within_s
    if cache.cache_controller is None:
        return ""
    while left := agree(_on_its_way(cache, ("ongoing_write_through", "ongoing_backup"))):
        if agree("late" if time.monotonic() > end else ""):
            return left
        cache.check_hicache_events()
        time.sleep(0.0005)
    return ""


_KINDS = ("ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup")


def _on_its_way(cache: Any, kinds: Sequence[str] = _KINDS) -> str:
    return ", ".join(f"{len(some)} {kind}" for kind in kinds if (some := getattr(cache, kind)))
