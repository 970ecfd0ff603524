"""Engines that prefill and engines that decode, apart: the same tokens as one engine, whoever of them dies, and each token of
one version."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from listening import listeners
from test_rollout import VERSIONS, Rig

from milkweed.rollout.sglang_pairs import PAGE
from milkweed.types import Completion, Sampling, VersionSpan

pytestmark = pytest.mark.stack

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = Sampling(temperature=0.0, max_tokens=250, ignore_eos=True)


def prompt(number: int, length: int = 200) -> list[int]:
    return [(number * 37 + 11 * i + i * i // 7) % 250 + 8 for i in range(length)]


class Apart(Rig):
    def greedy(self, ids: list[int], count: int) -> list[int]:
        """What transformers says of the model that the engines began with."""
        import torch

        row = torch.tensor([ids])
        done = self.model(VERSIONS[0]).generate(row, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        return done[0, len(ids) :].tolist()

    def begin(self, prompts: list[list[int]], sampling: Sampling) -> list[asyncio.Task[Completion]]:
        async def work() -> list[asyncio.Task[Completion]]:
            return [asyncio.ensure_future(self.router.sample(ids, sampling)) for ids in prompts]

        return self.run(work())

    def until(self, there: Any, within_s: float = 15.0) -> None:
        async def wait() -> None:
            async with asyncio.timeout(within_s):
                while not there():
                    await asyncio.sleep(0.01)

        self.run(wait())

    def end(self, tasks: list[asyncio.Task[Completion]]) -> list[Completion]:
        async def work() -> list[Completion]:
            return await asyncio.gather(*tasks)

        return self.run(work())

    def signal(self, engine: str, number: int) -> None:
        os.kill(self.router.stats()[engine].pids["scheduler0"], number)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    rig = Apart(tmp_path_factory.mktemp("models"), more=["rollout.prefill.replicas=2", "rollout.threads=1"])
    try:
        rig.up()
        yield rig
    finally:
        rig.down()


def test_tokens_are_those_of_one_engine_and_a_shared_beginning_is_computed_once(rig: Apart) -> None:
    before = rig.router.kv
    group = [[*prompt(0), 20 + i] for i in range(8)]
    done = rig.end(rig.begin([*group, prompt(1, 1), prompt(2, 700)], GREEDY))
    for c in done:
        assert c.token_ids == rig.greedy(c.prompt_ids, 24) and c.finish_reason == "length" and rig.worst(c) < 1e-4
        assert c.engine.startswith("rollout")
    after = rig.router.kv
    asked = sum(len(c.prompt_ids) for c in done)
    assert after["computed"] - before["computed"] <= asked - 6 * (200 - 200 % PAGE), "once on each of two engines"
    moved = after["moved_tokens"] - before["moved_tokens"]
    assert asked <= moved < asked + PAGE * len(done), "whole pages, and decoding engines hold nothing of their own"
    assert after["moved_bytes"] > 0 and after["moved_us"] > 0
    assert all(after[name]["computed"] == 0 for name in ("rollout0", "rollout1"))
    for c in rig.end(rig.begin([[*prompt(3), 9]] * 2, Sampling(temperature=0.7, max_tokens=1))):
        assert len(c.token_ids) == 1 and rig.worst(c) < 1e-4


def test_what_the_two_sides_meet_by_listens_on_loopback_only(rig: Apart) -> None:
    stats = rig.router.stats()
    where = {f"{name} {part}": listeners(pid) for name, s in stats.items() for part, pid in s.pids.items()}
    assert {address for found in where.values() for address in found} == {"127.0.0.1"}, where
    assert len(where["prefill0 engine"]) > len(where["rollout0 engine"])


def test_given_tokens_are_scored_where_prompts_are_computed(rig: Apart) -> None:
    reply = rig.run(rig.router.score(prompt(4), 2, name="a sequence"))
    first, *rest = prompt(4)
    whole = [VersionSpan(0, len(rest), VERSIONS[0])]
    said = Completion(
        prompt_ids=[first], token_ids=rest, logprobs=reply.logprobs[1:], versions=whole, sampling=Sampling(), finish_reason="length"
    )
    assert rig.worst(said) < 1e-4 and [len(row) for row in reply.top_ids] == [2] * len(rest)


def test_an_update_takes_both_sides_at_once_and_leaves_nothing_of_older_kv(rig: Apart) -> None:
    async def through() -> list[Completion]:
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        tasks = [asyncio.ensure_future(rig.router.sample([*prompt(5), 20 + i], sampling)) for i in range(6)]
        later: list[Any] = []
        for version in (1, 2, 3, 4):
            await asyncio.sleep(0.25)
            # these arrive with the update, in the middle of being prefilled and sent
            later += [asyncio.ensure_future(rig.router.sample([*prompt(5), 40 + version, i], sampling)) for i in range(3)]
            await asyncio.sleep(0)
            report = await rig.router.update_weights({"host0": rig.stage(VERSIONS[version])}, VERSIONS[version])
            assert report.failed == {} and set(rig.router.versions().values()) == {VERSIONS[version]}
        return await asyncio.gather(*tasks, *later)

    done = rig.run(through())
    assert max(len(c.versions) for c in done) >= 3
    for c in done:
        assert len(c.token_ids) == 200 and rig.worst(c) < 1e-4
    again = rig.end(rig.begin([prompt(0)], GREEDY))[0]
    assert again.cached_tokens == 0 and again.version == VERSIONS[4]
    assert again.token_ids == rig.greedy(prompt(0), 24), "even versions are the model that the engines began with"


def test_the_prefilling_side_dies(rig: Apart) -> None:
    """With samples in it that wait for their KV, and samples that it has prefilled, which go on; and an update comes before the
    decoding side knows that nobody writes into the KV which it had reserved."""
    running = rig.begin([prompt(10 + i) for i in range(4)], LONG)
    rig.until(lambda: not rig.router.load["prefill0"] + rig.router.load["prefill1"] and rig.router.load["rollout0"])
    rig.signal("prefill0", signal.SIGSTOP)
    waiting = rig.begin([prompt(20 + i) for i in range(4)], GREEDY)
    rig.until(lambda: rig.router.load["prefill0"])
    rig.signal("prefill0", signal.SIGKILL)
    rig.until(lambda: "prefill0" not in rig.router.versions())
    report = rig.run(rig.router.update_weights({"host0": rig.stage(VERSIONS[6])}, VERSIONS[6]))
    assert report.failed == {} and set(report.engines) == {"rollout0", "rollout1", "prefill1"}
    for c in rig.end([*running, *waiting]):
        assert c.token_ids == rig.greedy(c.prompt_ids, len(c.token_ids)) and rig.worst(c) < 1e-4
        assert len(c.token_ids) == c.sampling.max_tokens
    assert rig.router.load == {"rollout0": 0, "rollout1": 0, "prefill0": 0, "prefill1": 0, "": 0}


def test_the_decoding_side_dies(rig: Apart) -> None:
    """Its samples go on with the tokens that they have; and an update finds what is left idle."""
    running = rig.begin([prompt(30 + i) for i in range(6)], Sampling(temperature=0.0, max_tokens=600, ignore_eos=True))
    dying = rig.router.crew.find("rollout1")
    assert dying is not None
    rig.until(lambda: dying.pending and all(p.begun and p.begun.token_ids for p in dying.pending.values()))
    computed = rig.router.kv["computed"]
    rig.signal("rollout1", signal.SIGKILL)
    done = rig.end(running)
    for c in done:
        assert c.token_ids == rig.greedy(c.prompt_ids, 600) and c.engine == "rollout0" and rig.worst(c) < 1e-4
    assert rig.router.kv["computed"] - computed < 3 * 600, "prompts are in the cache of the prefilling side"
    report = rig.run(rig.router.update_weights({"host0": rig.stage(VERSIONS[7])}, VERSIONS[7]))
    assert report.failed == {} and set(report.engines) == {"rollout0", "prefill1"}
    assert rig.worst(rig.end(rig.begin([prompt(40)], GREEDY))[0]) < 1e-4
