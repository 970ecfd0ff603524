"""The router over engines that prefill or decode only, as plain objects: who is given a sample, who has it when one dies, and
what an update waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_router import V0, V1, FakeReplica, staged

from milkweed.errors import FleetError
from milkweed.rollout.pairing import PairedRouter
from milkweed.rollout.protocol import Collected, CommitReport, EngineReply, EngineStats, SampleError, encode
from milkweed.types import Completion, PolicyVersion, Sampling, VersionSpan


class Side(FakeReplica):
    """Holds what it is given while its gate is closed; what it gives back it has sampled two more tokens of. One that prefills
    answers without tokens."""

    def __init__(self, role: str, index: int) -> None:
        super().__init__(index)
        self.name = f"{role}{index}"
        self.stats = EngineStats(version=V0, state="serving", port=9000 + index if role == "prefill" else 0)
        self.given: list[Any] = []
        self.parted: list[EngineReply] = []
        self.answer = self.prefilled if role == "prefill" else self.sampled

    def prefilled(self, r: Any) -> EngineReply:
        return EngineReply(id=r.id)

    def sampled(self, r: Any, count: int = 0, reason: Any = "length") -> EngineReply:
        begun = r.begun.token_ids if r.begun else []
        new = [len(r.token_ids) + len(begun) + i for i in range(count or r.sampling.max_tokens - len(begun))]
        spans = [*(r.begun.versions if r.begun else []), VersionSpan(len(begun), len(begun) + len(new), self.stats.version)]
        logprobs = [-1.0] * (len(begun) + len(new))
        return EngineReply(id=r.id, token_ids=begun + new, logprobs=logprobs, versions=spans, finish_reason=reason)

    async def submit(self, raw: bytes) -> None:
        from milkweed.rollout.protocol import decode_requests

        self.given += decode_requests(raw)
        await super().submit(raw)

    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        while not self.parted and not (self.held and self.gate.is_set()):
            await asyncio.sleep(0.001)
        parted, self.parted = self.parted, []
        done, self.held = ({}, self.held) if not self.gate.is_set() else (self.held, {})
        return encode(Collected([*parted, *(self.answer(r) for r in done.values())], self.stats))

    async def abort(self, ids: list[str], keep: bool = False) -> None:
        self.aborted += ids
        for r in [self.held.pop(i) for i in ids if i in self.held]:
            pair = EngineReply(id=r.id, error="Prefill bootstrap failed: aborted", blame="pair")
            self.parted.append(pair if self.stats.port else self.sampled(r, 2, "abort"))

    async def commit(self, raw: bytes, deadline_s: float, fault: str = "") -> bytes:
        assert not self.held, "an engine takes no version while it has something to do"
        return await super().commit(raw, deadline_s, fault)


def scenario(prefill: int, decode: int, work: Any, **options: Any) -> None:
    async def run() -> None:
        sides = [Side("rollout", i) for i in range(decode)] + [Side("prefill", i) for i in range(prefill)]
        router = PairedRouter(sides, [s.stats for s in sides], **options)
        try:
            async with asyncio.timeout(10):
                await work(router, {s.name: s for s in sides})
        finally:
            await router.close()
        assert all(s.stopped for s in sides)

    asyncio.run(run())


FOUR = Sampling(max_tokens=4)


def whole(c: Completion) -> bool:
    return c.token_ids == [len(c.prompt_ids) + i for i in range(c.sampling.max_tokens)]


def test_each_sample_goes_to_a_pair_under_a_room_of_its_own_and_both_kinds_are_spread() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        done = await asyncio.gather(*(router.sample([i], FOUR) for i in range(8)))
        assert all(whole(c) and c.engine.startswith("rollout") for c in done)
        assert [len(sides[n].given) for n in ("prefill0", "prefill1", "rollout0", "rollout1")] == [4, 4, 4, 4]
        prefilled = {r.id: r.pair for n in ("prefill0", "prefill1") for r in sides[n].given}
        decoded = {r.id: r.pair for n in ("rollout0", "rollout1") for r in sides[n].given}
        assert prefilled == decoded and len({p.room for p in decoded.values()}) == 8
        assert all(p.version == V0 for p in decoded.values())
        assert all(r.pair.port == 9001 for r in sides["prefill1"].given)

    scenario(2, 2, work)


def test_samples_go_where_their_beginning_was_prefilled_and_never_by_what_was_decoded() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        long = list(range(640))
        for i in range(6):
            assert whole(await router.sample([*long, i], FOUR))
        assert sorted(len(sides[n].given) for n in ("prefill0", "prefill1")) == [0, 6]
        assert router.kv["prefix_hits"] == 5

    scenario(2, 2, work)


@pytest.mark.parametrize("dies", ["prefill", "rollout"])
def test_where_one_side_dies_another_pair_goes_on_and_the_other_side_is_told(dies: str) -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        for s in sides.values():
            s.gate.clear()
        tasks = [asyncio.create_task(router.sample([i], FOUR)) for i in range(4)]
        await asyncio.sleep(0.02)
        lost = [r.id for r in sides[f"{dies}0"].given]
        sides[f"{dies}0"].die()
        await asyncio.sleep(0.02)
        others = [s for s in sides.values() if not s.name.startswith(dies)]
        assert lost and sorted(i for s in others for i in s.aborted) == sorted(lost)
        assert sides[f"{dies}1"].aborted == [] and len(sides[f"{dies}1"].given) == 4
        for s in sides.values():
            s.gate.set()
        assert all(whole(c) for c in await asyncio.gather(*tasks))
        rooms = [r.pair.room for s in sides.values() if s.name.startswith(dies) for r in s.given]
        assert len(set(rooms)) == len(rooms) == 6, "a room is never used twice"
        assert router.load == {"rollout0": 0, "rollout1": 0, "prefill0": 0, "prefill1": 0, "": 0}

    scenario(2, 2, work)


def test_what_has_been_prefilled_outlives_the_engine_that_did_it() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        sides["rollout0"].gate.clear()
        task = asyncio.create_task(router.sample([1], FOUR))
        await asyncio.sleep(0.02)
        assert router.load == {"rollout0": 1, "prefill0": 0, "prefill1": 0, "": 0}
        for n in ("prefill0", "prefill1"):
            sides[n].die()
        await asyncio.sleep(0.02)
        assert sides["rollout0"].aborted == []
        sides["rollout0"].gate.set()
        assert whole(await task)
        with pytest.raises(FleetError, match="no engine can sample.*killed"):
            await router.sample([1], FOUR)

    scenario(2, 1, work)


def test_kv_that_does_not_arrive_is_sent_again_and_given_up_at_last() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        sides["rollout0"].gate.clear()
        sides["prefill0"].answer = lambda r: EngineReply(id=r.id, error="Prefill transfer failed", blame="pair")
        with pytest.raises(SampleError, match="task 7.*prefill0, prefill0, prefill0 failed under it.*Prefill transfer failed"):
            await router.sample([1], FOUR, name="task 7")
        await asyncio.sleep(0.02)
        assert len(sides["rollout0"].aborted) == 3 and router.load[""] == 0

    scenario(1, 1, work)


def test_an_update_waits_for_what_is_prefilled_takes_everything_back_and_goes_on() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        for s in sides.values():
            s.gate.clear()
            s.commits = [CommitReport(ok=True, state="serving", version=V1)]
        tasks = [asyncio.create_task(router.sample([i], FOUR)) for i in range(3)]
        seeded = asyncio.create_task(router.sample([9], Sampling(max_tokens=4, seed=5)))
        await asyncio.sleep(0.02)
        update = asyncio.create_task(router.update_weights(staged(V1), V1))
        late = asyncio.create_task(router.sample([7], FOUR))
        await asyncio.sleep(0.02)
        assert not any(s.aborted for s in sides.values()), "what is being prefilled is waited for"
        assert sum(len(s.given) for s in sides.values()) == 8 and router.load[""] == 1, "nothing new is admitted"
        sides["prefill0"].gate.set()
        report = await update
        assert set(report.engines) == {"prefill0", "rollout0"} and report.failed == {}
        assert len(sides["rollout0"].aborted) >= 4
        sides["rollout0"].gate.set()
        for c in await asyncio.gather(*tasks):
            assert whole(c) and c.versions == [VersionSpan(0, 2, V0), VersionSpan(2, 4, V1)]
        begun_again = await seeded
        assert whole(begun_again) and begun_again.versions == [VersionSpan(0, 4, V1)]
        assert whole(await late)
        assert sides["rollout0"].given[4].pair.version == V1
        assert [r.token_ids for r in sides["prefill0"].given[-1:]] == [[7]], "those that had begun go first"

    scenario(1, 1, work)


def test_a_decoding_engine_that_missed_a_version_gets_nothing() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        for s in sides.values():
            s.commits = [CommitReport(ok=s.name != "rollout0", state="serving", version=V0 if s.name == "rollout0" else V1, message="full")]
        assert (await router.update_weights(staged(V1), V1)).failed == {"rollout0": "full"}
        done = await asyncio.gather(*(router.sample([i], FOUR) for i in range(4)))
        assert {c.engine for c in done} == {"rollout1"} and {c.version for c in done} == {PolicyVersion(0, 1)}

    scenario(1, 2, work)


def test_a_cancelled_sample_is_stopped_on_both_sides() -> None:
    async def work(router: PairedRouter, sides: dict[str, Side]) -> None:
        for s in sides.values():
            s.gate.clear()
        task = asyncio.create_task(router.sample([1], FOUR))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.02)
        assert sides["rollout0"].aborted == sides["prefill0"].aborted == [sides["rollout0"].given[0].id]
        assert router.load == {"rollout0": 0, "prefill0": 0, "": 0}

    scenario(1, 1, work)
