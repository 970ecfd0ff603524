"""Deterministic mode on a real engine: a sample's bits are a function of its seed and prompt, whatever else goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from rollout_rig import VERSIONS, Rig

from milkweed.config import load_mesh
from milkweed.types import Completion, Sampling

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    made = Rig(tmp_path_factory.mktemp("models"), replicas=1)
    made.mesh = load_mesh("local", ["rollout.engine.enable_deterministic_inference=true"])
    try:
        made.up()
        yield made
    finally:
        made.down()


PROMPT = [(7 * n) % 90 + 3 for n in range(150)]
HOW = Sampling(max_tokens=60, ignore_eos=True, seed=12345)


def bits(c: Completion) -> tuple[list[int], list[float]]:
    assert len(c.token_ids) == HOW.max_tokens
    return c.token_ids, c.logprobs


def test_one_request_has_the_same_bits_alone_among_32_after_a_prefix_hit_and_after_a_retraction(rig):
    async def all_ways() -> None:
        router = rig.router
        alone = await router.sample(PROMPT, HOW)
        assert alone.cached_tokens == 0 and len(set(alone.token_ids)) > 10, "it is really sampled"
        hit = await router.sample(PROMPT, HOW)
        assert hit.cached_tokens >= 100
        partial = await router.sample([*PROMPT[:77], 1, 2, 3], msgspec.structs.replace(HOW, seed=1))
        assert 0 < partial.cached_tokens < 100
        others = [router.sample([(3 + i) % 90 + 3] * (5 * i + 1), msgspec.structs.replace(HOW, seed=i, max_tokens=10 + 3 * i)) for i in range(31)]
        _, among = await asyncio.gather(asyncio.gather(*others[:16]), router.sample(PROMPT, HOW))
        await asyncio.gather(*others[16:])
        other_seed = await router.sample(PROMPT, msgspec.structs.replace(HOW, seed=54321))

        running = asyncio.gather(*(router.sample(PROMPT, msgspec.structs.replace(HOW, seed=s)) for s in (12345, 5, 6)))
        await asyncio.sleep(0.15)
        host = rig.fleet.hosts[0].name
        report = await router.update_weights({host: rig.stage(VERSIONS[2])}, VERSIONS[2])  # the same weights again
        retracted = (await running)[0]
        assert len(retracted.versions) == 2, (report, "the update came between two of its tokens")

        assert bits(hit) == bits(among) == bits(retracted) == bits(alone)
        assert bits(other_seed) != bits(alone)

    rig.run(all_ways(), 120)
