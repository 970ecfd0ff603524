"""What an update does with KV on its way between tiers, and which requests are left for a later prefill; on a stand-in for
SGLang's scheduler."""

from __future__ import annotations

import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from milkweed.rollout import sglang_kv
from milkweed.types import PolicyVersion


class Cache:
    """Needs `rounds` looks until what is on its way has ended."""

    def __init__(self, pages: Any, rounds: int = 3) -> None:
        self.cache_controller = SimpleNamespace(storage_backend=SimpleNamespace(pages=pages))
        self.enable_storage = True
        self.ongoing_write_through, self.ongoing_load_back = {1: 1}, {}
        self.ongoing_prefetch, self.ongoing_backup = {"r": 1}, {}
        self.rounds, self.released = rounds, []

    def release_aborted_request(self, handle: str) -> None:
        self.released.append(handle)
        self.ongoing_prefetch.pop(handle, None)

    def check_hicache_events(self) -> None:
        self.rounds -= 1
        if self.rounds == 0:
            self.ongoing_write_through.clear()


def scheduler(**more: Any) -> Any:
    served: list[PolicyVersion] = []
    pages = SimpleNamespace(closed=False, served=served, serve=served.append)
    waiting = [SimpleNamespace(cache_request_handle=h, cache_salt="0.0") for h in ("r", "s")]
    cache = Cache(pages, **more)
    return SimpleNamespace(
        tree_cache=cache, waiting_queue=waiting, enable_hicache_storage=True, pages=pages,
        server_args=SimpleNamespace(weight_version="0.0"),
    )  # fmt: skip


def test_an_update_ends_what_is_on_its_way_and_salts_who_waits() -> None:
    s = scheduler()
    still = sglang_kv.Still(s)
    still.begin()
    assert s.pages.closed and not s.enable_hicache_storage
    still.drain(lambda answer: answer)
    assert s.tree_cache.released == ["r", "s"] and not s.tree_cache.ongoing_prefetch and s.tree_cache.rounds == 0
    still.serve("1.5")
    still.end()
    assert s.pages.served == [PolicyVersion(1, 5)] and not s.pages.closed and s.enable_hicache_storage
    assert [r.cache_salt for r in s.waiting_queue] == ["1.5", "1.5"]
    new = SimpleNamespace(cache_salt="what the caller says")
    assert sglang_kv._salted(lambda s, r: r, s, new).cache_salt == "1.5"
    assert sglang_kv._salted(lambda s, r: r, scheduler(), new).cache_salt == "0.0"


def test_what_does_not_end_fails_the_update_with_its_name_and_keeps_the_old_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_kv, "DRAIN_S", 0.05)
    s = scheduler(rounds=1 << 30)
    still = sglang_kv.Still(s)
    still.begin()
    with pytest.raises(RuntimeError, match="1 ongoing_write_through"):
        still.drain(lambda answer: answer)
    still.end()
    assert not s.pages.closed and s.enable_hicache_storage and s.waiting_queue[0].cache_salt == "0.0"


def test_ranks_that_do_not_end_together_wait_for_each_other() -> None:
    s, answers = scheduler(rounds=1), iter(["", "1 ongoing_backup", "", ""])
    sglang_kv.Still(s).drain(lambda answer: answer or next(answers))
    assert next(answers, None) is None


def test_without_a_tier_nothing_is_touched() -> None:
    s = scheduler()
    s.tree_cache.cache_controller = None
    still = sglang_kv.Still(s)
    still.begin()
    still.drain(lambda answer: pytest.fail("nobody was to be asked"))
    still.serve("0.1")
    still.end()
    assert s.waiting_queue[0].cache_salt == "0.0" and not s.pages.served


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    def _compute_max_prefix_len(self, length: int) -> int:
        return 0 if self.scored else length - 1


def requests(count: int, scored: bool = False) -> list[Any]:
    keys = {"extra_key": None, "cache_salt": None, "prefix_len": 0, "host_hit_length": 0, "scored": scored}
    return [Request(rid=str(i), origin_input_ids=array("q", range(500)), **keys) for i in range(count)]


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tokens of a request SGLang finds in its cache."""
    lengths: dict[str, int] = {}
    module: Any = ModuleType("sglang.srt.mem_cache.common")
    module.match_kv_cache = lambda request, cache: setattr(request, "prefix_len", lengths.get(request.rid, 0))
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lengths


def prefill(s: Any, admit: int = 100, full: bool = False) -> list[str]:
    """The requests that the next batch is made of; the first `admit` of those it is made from."""

    def original(s: Any, running: Any) -> list[Any]:
        batch, s.waiting_queue = s.waiting_queue[:admit], s.waiting_queue[admit:]
        return batch

    return [r.rid for r in sglang_kv.shared_prefill(original, s, SimpleNamespace(batch_is_full=full))]


def waiting(queue: list[Any], *, sharing: bool = True) -> Any:
    return SimpleNamespace(
        waiting_queue=queue, last_batch=None, chunked_req=None, tree_cache=SimpleNamespace(supports_prefix_sharing=lambda: sharing)
    )


def test_the_first_computes_and_the_others_wait_until_its_kv_is_there(matched: dict[str, int]) -> None:
    all_of_them = requests(4)
    s = waiting(list(all_of_them))
    assert prefill(s) == ["0"] and [r.rid for r in s.waiting_queue] == ["1", "2", "3"]
    s.last_batch = SimpleNamespace(reqs=[all_of_them[0]], forward_mode=SimpleNamespace(is_extend=lambda: True))
    assert prefill(s) == [], "its result has not been processed"
    s.last_batch = SimpleNamespace(reqs=[all_of_them[0]], forward_mode=SimpleNamespace(is_extend=lambda: False))
    matched.update({"1": 499, "2": 499, "3": 499})
    assert prefill(s, admit=2) == ["1", "2"] and [r.rid for r in s.waiting_queue] == ["3"]


def test_requests_keep_their_order_whatever_is_left(matched: dict[str, int]) -> None:
    a, b, c = requests(3)
    other = Request(rid="x", origin_input_ids=array("q", range(1000, 1100)), extra_key=None, cache_salt=None, scored=False)
    s = waiting([a, b, other, c])
    assert prefill(s, admit=1) == ["0"]
    assert [r.rid for r in s.waiting_queue] == ["1", "x", "2"]


def test_scored_prompts_and_caches_that_share_nothing_wait_for_nobody(matched: dict[str, int]) -> None:
    assert prefill(waiting(requests(3, scored=True))) == ["0", "1", "2"]
    assert prefill(waiting(requests(3), sharing=False)) == ["0", "1", "2"]
    assert prefill(waiting(requests(3)), full=True) == ["0", "1", "2"]


def test_what_was_computed_is_driven_to_its_end_and_what_is_missing_is_told() -> None:
    s = scheduler(rounds=2)
    assert sglang_kv.settle(s, lambda answer: answer, 1.0) == "" and s.tree_cache.rounds == 0
    assert s.tree_cache.ongoing_prefetch, "what is read is left alone"
    assert "1 ongoing_write_through" in sglang_kv.settle(scheduler(rounds=1 << 30), lambda answer: answer, 0.05)
    s.tree_cache.cache_controller = None
    assert sglang_kv.settle(s, lambda answer: pytest.fail("nobody was to be asked"), 1.0) == ""
