"""Requests that begin alike and wait for one of them, driven as a scheduler would drive them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from milkweed.rollout.sharing import BLOCK, LEADERS, WORTH, held_back


def request(rid: str, ids: list[int], salt: str | None = None) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=array("q", ids), extra_key=None, cache_salt=salt)


class Cache:
    """Knows prompts once they are computed, and counts what was computed. With `keeps` off it forgets them."""

    def __init__(self, keeps: bool = True) -> None:
        self.prompts: list[tuple[str | None, list[int]]] = []
        self.keeps, self.computed = keeps, 0

    def match(self, r: Any) -> int:
        best = 0
        for salt, ids in self.prompts:
            if salt == r.cache_salt:
                same = next((n for n, (a, b) in enumerate(zip(ids, r.origin_input_ids)) if a != b), min(len(ids), len(r.origin_input_ids)))
                best = max(best, same)
        return best

    def saved(self, r: Any, shared: int) -> int:
        return min(shared, len(r.origin_input_ids) - 1) - self.match(r)

    def compute(self, some: list[Any]) -> None:
        self.computed += sum(len(r.origin_input_ids) - min(self.match(r), len(r.origin_input_ids) - 1) for r in some)
        self.prompts += [(r.cache_salt, list(r.origin_input_ids)) for r in some] if self.keeps else []


def schedule(waiting: list[Any], cache: Cache, late: int = 1) -> int:
    """Prefills until none waits; a batch is in the cache `late` rounds after its own. Returns the rounds."""
    rounds, computing = 0, []
    while waiting:
        rounds += 1
        assert rounds < 200
        left = held_back(waiting, [r for batch in computing for r in batch], cache.saved)
        ids = {r.rid for r in left}
        computing.append([r for r in waiting if r.rid not in ids])
        assert computing[-1] or any(computing[:-1]), "all wait, and none computes"
        waiting = left
        if len(computing) > late:
            cache.compute(computing.pop(0))
    for batch in computing:
        cache.compute(batch)
    return rounds


def test_a_group_computes_its_prompt_once() -> None:
    cache = Cache()
    schedule([request(str(i), list(range(500))) for i in range(8)], cache)
    assert cache.computed == 500 + 7


def test_groups_with_one_system_prompt_compute_it_once_and_each_question_once() -> None:
    system, cache = list(range(200)), Cache()
    groups = [request(f"{g}/{i}", [*system, *range(1000 * g, 1000 * g + 100)]) for g in range(1, 6) for i in range(8)]
    schedule(groups, cache)
    assert cache.computed < 200 + 5 * (100 + BLOCK) + 35 * BLOCK


def test_what_is_too_short_or_of_another_version_does_not_wait() -> None:
    cache = Cache()
    assert schedule([request(str(i), list(range(WORTH - 1))) for i in range(8)], cache) == 1
    salted = [request(v, list(range(500)), salt=v) for v in ("1", "2", "3")]
    assert schedule(salted, cache) == 1 and cache.computed == 8 * (WORTH - 1) + 3 * 500


def test_a_cache_that_keeps_nothing_does_not_line_requests_up() -> None:
    cache = Cache(keeps=False)
    assert schedule([request(str(i), list(range(500))) for i in range(40)], cache) <= 2 * LEADERS + 2
    assert cache.computed == 40 * 500


@given(st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=5), max_size=20), st.integers(1, 3))
def test_every_request_is_computed_and_never_more_than_without_waiting(prompts: list[list[int]], late: int) -> None:
    """Prompts of blocks of two kinds, so that they share beginnings of all lengths."""
    made = [request(str(i), [kind for kind in p for _ in range(BLOCK + 7)]) for i, p in enumerate(prompts) if p]
    cache = Cache()
    schedule(list(made), cache, late)
    assert len(cache.prompts) == len(made)
    assert cache.computed <= sum(len(r.origin_input_ids) for r in made)
