"""Which engine gets a sample: where its prefix is, unless that one is much busier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_router import V0, V1, FakeReplica, scenario

from milkweed.config import load_mesh
from milkweed.errors import ConfigError
from milkweed.observe.view import View
from milkweed.rollout.affinity import BLOCK, Prefixes, blocks
from milkweed.rollout.protocol import EngineReply, EngineRequest, EngineStats
from milkweed.rollout.records import Engine, Pending
from milkweed.rollout.router import Router
from milkweed.runs.rows import _since, _speeds
from milkweed.types import Sampling

LONG = list(range(500))
"""At the default weight of 16 it outweighs 7.68 samples: its 15 whole blocks are 480 tokens."""


def test_a_block_depends_on_all_before_it_and_on_the_version() -> None:
    one, other = blocks(V0, LONG), blocks(V0, [7, *LONG[1:]])
    assert len(one) == 500 // BLOCK and not set(one) & set(other)
    assert blocks(V0, LONG[:100]) == one[: 100 // BLOCK]
    assert not set(one) & set(blocks(V1, LONG))


def test_a_group_stays_together_where_its_prompt_is_long_and_spreads_where_it_is_short() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.gate.clear()
        tasks = [asyncio.create_task(router.sample(LONG)) for _ in range(8)]
        await asyncio.sleep(0.02)
        assert sorted(len(r.held) for r in replicas) == [0, 8] and router.kv["prefix_hits"] == 7
        tasks += [asyncio.create_task(router.sample(LONG)) for _ in range(8)]
        await asyncio.sleep(0.02)
        assert [len(r.held) for r in replicas] == [8, 8], "an engine with 8 more than the other is too busy"
        assert router.kv["prefix_passed"] == 1 and router.kv["prefix_hits"] == 14, "after that the other holds it too"
        tasks += [asyncio.create_task(router.sample([5, 6, 7])) for _ in range(12)]
        await asyncio.sleep(0.02)
        assert [len(r.held) for r in replicas] == [14, 14]
        for r in replicas:
            r.gate.set()
        await asyncio.gather(*tasks)

    scenario(2, work)


def test_a_turn_goes_where_the_turns_before_it_are() -> None:
    """Eight conversations from one prompt, spread over two engines, each kept where it is."""

    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.answer = lambda q, r=r: EngineReply(id=q.id, token_ids=[q.token_ids[-1]] * 80, logprobs=[-1.0] * 80)
        prompts = [[*range(64), i] for i in range(8)]
        first = await asyncio.gather(*(router.sample(p) for p in prompts))
        homes = [c.engine for c in first]
        assert set(homes) == {"rollout0", "rollout1"}
        for _ in range(3):
            prompts = [[*p, *c.token_ids, 9] for p, c in zip(prompts, first)]
            first = await asyncio.gather(*(router.sample(p) for p in reversed(prompts)))
            first.reverse()
            assert [c.engine for c in first] == homes

    scenario(2, work)


def test_new_weights_and_a_lost_engine_leave_no_prefix() -> None:
    p = Pending(EngineRequest("r", LONG, Sampling()), None)  # type: ignore[arg-type]
    one, two = (Engine(FakeReplica(i), EngineStats(version=V0, state="serving")) for i in range(2))
    prefixes = Prefixes(16)
    assert prefixes.choose(p, V0, two, 256) is two
    prefixes.given(one, p)
    assert prefixes.choose(p, V0, two, 256) is one and prefixes.choose(p, V1, two, 256) is two
    one.pending = dict.fromkeys(map(str, range(7)), p)
    assert prefixes.choose(p, V0, two, 256) is one
    assert prefixes.choose(p, V0, two, 7) is two, "it is full"
    one.pending["7"] = p
    assert prefixes.choose(p, V0, two, 256) is two, "it is too busy"
    one.pending = {}
    prefixes.forget(one)
    assert prefixes.choose(p, V0, two, 256) is two
    assert not prefixes._holders and not prefixes._held


def test_an_engine_is_taken_to_hold_the_latest_that_its_pool_has_room_for() -> None:
    engine = Engine(FakeReplica(0), EngineStats(version=V0, state="serving", pool_tokens=10 * BLOCK))
    other, prefixes = Engine(FakeReplica(1), EngineStats(version=V0, state="serving")), Prefixes(16)
    samples = [Pending(EngineRequest(str(i), [i] * 4 * BLOCK, Sampling()), None) for i in range(3)]  # type: ignore[arg-type]
    for p in samples:
        prefixes.choose(p, V0, other, 256)
        prefixes.given(engine, p)
    depths = [sum(n in prefixes._holders for n in p.blocks[1]) for p in samples]
    assert depths == [2, 4, 4] and samples[0].blocks[1][0] in prefixes._holders, "of the oldest its end went first"


def test_at_weight_0_load_alone_counts_and_other_weights_are_refused() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.gate.clear()
        tasks = [asyncio.create_task(router.sample(LONG)) for _ in range(8)]
        await asyncio.sleep(0.02)
        assert [len(r.held) for r in replicas] == [4, 4]
        for r in replicas:
            r.gate.set()
        await asyncio.gather(*tasks)

    scenario(2, work, overlap_score_weight=0.0)
    for wrong in ("-1", "inf"):
        with pytest.raises(ConfigError, match="rollout.overlap_score_weight"):
            load_mesh("local", [f"rollout.overlap_score_weight={wrong}"])


def test_tokens_computed_and_reused_are_counted_by_engine_and_a_replaced_engine_stays_counted() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r, cached in zip(replicas, (30, 0)):
            r.stats.prompt_tokens, r.stats.cached_tokens = 100, cached
        await asyncio.gather(*(router.sample([i]) for i in range(4)))
        before = router.kv
        assert before["rollout0"] == {"computed": 70, "reused": 30} and before["rollout1"] == {"computed": 100, "reused": 0}
        assert (before["computed"], before["reused"]) == (170, 30)
        replicas[0].die()
        await asyncio.sleep(0.01)
        new = FakeReplica(0)
        new.stats.prompt_tokens, new.stats.cached_tokens = 50, 50
        replicas.append(new)
        router.admit(new, new.stats)
        assert _since(before, router.kv) == {
            "computed": 0, "reused": 50, "prefix_hits": 0, "prefix_passed": 0,
            "rollout0": {"computed": 0, "reused": 50}, "rollout1": {"computed": 0, "reused": 0},
        }  # fmt: skip

    scenario(2, work)


def test_what_came_from_a_tier_below_is_counted_where_there_is_one() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        s = replicas[0].stats
        s.prompt_tokens, s.cached_tokens, s.cached_memory, s.cached_files = 100, 60, 32, 16
        s.files = {"read": 1, "bad": 2}
        await asyncio.gather(*(router.sample([i]) for i in range(4)))
        below = {"from_memory": 32, "from_files": 16, "read": 1, "bad": 2}
        assert router.kv["rollout0"] == {"computed": 40, "reused": 60, **below}
        assert router.kv["rollout1"] == {"computed": 0, "reused": 0}
        assert router.kv.items() >= {"computed": 40, "reused": 60, **below}.items()

    scenario(2, work)


def test_what_went_to_files_has_its_speed_in_the_row() -> None:
    one = {"written": 2, "written_bytes": 8000, "written_us": 4, "read": 0, "read_bytes": 0, "read_us": 0}
    plain = {"written": 2, "written_bytes": 8000, "written_gb_s": 2.0, "read": 0, "read_bytes": 0}
    assert _speeds({**one, "rollout0": dict(one)}) == {**plain, "rollout0": plain}


def test_the_view_says_what_part_of_the_prompts_was_cached() -> None:
    def said(row: dict[str, Any]) -> dict[str, str]:
        return dict(View._numbers(row))

    assert said({"kv": {"computed": 25, "reused": 75}})["cached"] == "75%"
    assert "cached" not in said({"kv": {"computed": 0, "reused": 0}}) and "cached" not in said({})
