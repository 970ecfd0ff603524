"""Samples whose engine dies, breaks or leaves go on elsewhere from the tokens they have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_router import V0, V1, V2, FakeReplica, scenario

import milkweed.rollout.engine as engine_module
from milkweed.rollout.answers import grown, join, since, usable
from milkweed.rollout.engine import RolloutEngine
from milkweed.rollout.protocol import Begun, Collected, EngineReply, EngineRequest, EngineSpec, Progress, encode
from milkweed.rollout.router import Router
from milkweed.types import PolicyVersion, Sampling, VersionSpan


def begun(tokens: list[int], *spans: tuple[int, PolicyVersion]) -> Begun:
    """`spans` are the ends of the versions."""
    starts = [0, *(end for end, _ in spans)]
    versions = [VersionSpan(a, b, v) for a, (b, v) in zip(starts, spans)]
    return Begun(tokens, [-t / 10 for t in tokens], versions)


class Counting(FakeReplica):
    """Samples 1, 2, 3, ... up to `max_tokens`; says how far each is when told to, and gives back what it has."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.answer = lambda r: self.reply(r, r.sampling.max_tokens, "length")
        self.out: list[EngineReply] = []
        self.told: list[Progress] = []

    def reply(self, r: EngineRequest, upto: int, reason: Any) -> EngineReply:
        n = len(r.begun.token_ids) if r.begun else 0
        whole = join(r.begun, begun([*range(n + 1, upto + 1)], (upto - n, self.stats.version)))
        return EngineReply(id=r.id, token_ids=whole.token_ids, logprobs=whole.logprobs, versions=whole.versions, finish_reason=reason)

    def tell(self, upto: int) -> None:
        for r in self.held.values():
            n = len(r.begun.token_ids) if r.begun else 0
            self.told.append(Progress(r.id, n, begun([*range(n + 1, upto + 1)], (upto - n, self.stats.version))))
        self.news.set()

    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        while not (self.out or self.told or (self.held and self.gate.is_set())):
            self.news.clear()
            news, gate = asyncio.ensure_future(self.news.wait()), asyncio.ensure_future(self.gate.wait() if self.held else asyncio.sleep(9))
            await asyncio.wait({news, gate}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel(), gate.cancel()
        held = list(self.held.values()) if self.gate.is_set() else []
        for r in held:
            del self.held[r.id]
        out, self.out, told, self.told = [*self.out, *map(self.answer, held)], [], self.told, []
        return encode(Collected(out, self.stats, told))

    async def abort(self, ids: list[str]) -> None:
        self.out += [self.reply(self.held.pop(i), 5, "abort") for i in ids if i in self.held]
        self.news.set()


def counted(count: int, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scenario.__globals__, "FakeReplica", Counting)
    scenario(count, work)


def test_the_samples_of_an_engine_that_dies_go_on_elsewhere_from_the_tokens_they_have(monkeypatch):
    async def work(router: Router, replicas: list[Counting]) -> None:
        first, second = replicas
        first.gate.clear(), second.gate.clear()
        task = asyncio.create_task(router.sample([9], Sampling(max_tokens=8)))
        await asyncio.sleep(0.02)
        first.tell(3)
        await asyncio.sleep(0.02)
        second.stats.version = V1
        first.die()
        await asyncio.sleep(0.02)
        (request,) = second.held.values()
        assert request.begun == begun([1, 2, 3], (3, V0)) and request.token_ids == [9], "and the prompt is the prompt"
        second.tell(6)
        await asyncio.sleep(0.02)
        second.gate.set()
        done = await task
        assert done.token_ids == [*range(1, 9)] and len(done.logprobs) == 8 and done.prompt_ids == [9]
        assert done.versions == [VersionSpan(0, 3, V0), VersionSpan(3, 8, V1)] and done.sampling.max_tokens == 8

    counted(2, work, monkeypatch)


def test_what_promises_the_same_tokens_or_has_stop_strings_begins_again(monkeypatch):
    async def work(router: Router, replicas: list[Counting]) -> None:
        first, second = replicas
        first.gate.clear()
        kinds = [Sampling(max_tokens=8, seed=1), Sampling(max_tokens=8, stop=("x",)), Sampling(max_tokens=8, stop_token_ids=(99,))]
        tasks = [asyncio.create_task(router.sample([9], s)) for s in kinds for _ in replicas]
        await asyncio.sleep(0.02)
        assert len(first.held) == 3 and not second.held
        seen: list[EngineRequest] = []
        second.answer = lambda r: (seen.append(r), second.reply(r, 8, "length"))[1]
        leaving = asyncio.create_task(router.leave("rollout0", within_s=0.1))
        assert [(await t).token_ids for t in tasks] == [[*range(1, 9)]] * 6
        await leaving
        assert [r.begun and r.begun.token_ids for r in seen] == [None, None, [1, 2, 3, 4, 5]]

    counted(2, work, monkeypatch)


def test_an_engine_that_breaks_gives_its_tokens_with_its_samples(monkeypatch):
    async def work(router: Router, replicas: list[Counting]) -> None:
        first, second = replicas
        first.gate.clear(), second.gate.clear()
        task = asyncio.create_task(router.sample([9], Sampling(max_tokens=8)))
        await asyncio.sleep(0.02)
        (r,) = first.held.values()
        reply = first.reply(r, 4, "error")
        reply.error, reply.blame = "half a version", "engine"
        first.stats.state, first.stats.cause = "broken", "half a version"
        first.held.clear()
        first.out.append(reply)
        first.news.set()
        await asyncio.sleep(0.02)
        assert [r.begun and r.begun.token_ids for r in second.held.values()] == [[1, 2, 3, 4]]
        second.gate.set()
        assert (await task).token_ids == [*range(1, 9)]

    counted(2, work, monkeypatch)


def test_tokens_and_their_versions_are_cut_and_joined():
    whole = begun([1, 2, 3, 4, 5, 6], (2, V0), (5, V1), (6, V2))
    for cut in range(1, 6):
        head = Begun(whole.token_ids[:cut], whole.logprobs[:cut], begun(whole.token_ids, *[(min(e, cut), v) for e, v in ((2, V0), (5, V1))]).versions)
        head.versions = [s for s in head.versions if s.end > s.start]
        if cut < 6:
            assert join(head, since(whole, cut)) == whole, cut
    assert grown(None, Progress("a", 0, whole)) == whole
    assert grown(whole, Progress("a", 7, whole)) is whole, "something between was missed"
    assert usable(whole, Sampling(max_tokens=6)) is None, "there would be nothing left to sample"
    assert usable(whole, Sampling(max_tokens=7)) is whole


class Scheduler:
    """Stands where SGLang stands: counts on from what it is given."""

    files = staticmethod(dict)
    longest_prompt, context_length, pool_tokens, deterministic, start_s, pids = 20, 40, 80, True, 0.0, dict[str, int]()

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.cause: str | None = None
        self.gate = asyncio.Event()

    def dead(self) -> str | None:
        return self.cause

    def answer(self, ids: list[int], count: int, reason: Any) -> dict[str, Any]:
        new = [ids[-1] + 1 + i for i in range(count)]
        spans = [{"version": "0.1", "start": 0, "end": count}]
        logprobs = [(-0.5, t, None) for t in new]
        return {"output_ids": new, "meta_info": {"output_token_logprobs": logprobs, "weight_versions": spans, "finish_reason": reason}}

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling, grown: Any, pair: Any = None) -> dict[str, Any]:
        self.asked.append((ids, sampling.max_tokens))
        if grown is not None:
            grown(self.answer(ids, 2, None))
        await self.gate.wait()
        return self.answer(ids, sampling.max_tokens, {"type": "length"})

    def decode(self, rows: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def engine() -> tuple[RolloutEngine, Scheduler]:
    it, scheduler = RolloutEngine(EngineSpec(model="")), Scheduler()
    it._sglang = scheduler  # type: ignore[assignment]
    return it, scheduler


def test_an_engine_goes_on_from_what_was_begun_and_answers_with_the_whole():
    async def run() -> None:
        it, scheduler = engine()
        had = begun([1, 2, 3], (3, V0))
        await it.submit([EngineRequest("a", [0], Sampling(max_tokens=8), begun=had), EngineRequest("b", [0] * 19, Sampling(max_tokens=8), begun=had)])
        await asyncio.sleep(0)
        assert scheduler.asked == [([0, 1, 2, 3], 5), ([0] * 19, 8)], "what does not fit as a prompt begins again"
        scheduler.gate.set()
        replies = {r.id: r for r in (await it.collect(1, 0.1)).replies}
        assert replies["a"].token_ids == [*range(1, 9)] and replies["a"].text == "1 2 3 4 5 6 7 8"
        assert replies["a"].versions == [VersionSpan(0, 3, V0), VersionSpan(3, 8, V1)]
        assert replies["a"].logprobs == [-0.1, -0.2, -0.3, *[-0.5] * 5]
        assert replies["b"].token_ids == [*range(1, 9)] and it.stats().tokens == 13

    asyncio.run(run())


def test_an_engine_tells_how_far_it_is_and_its_death_gives_the_rest(monkeypatch):
    monkeypatch.setattr(engine_module, "PROGRESS_S", 0.02)

    async def run() -> None:
        it, scheduler = engine()
        await it.submit([EngineRequest("a", [0], Sampling(max_tokens=8), begun=begun([1], (1, V0))), EngineRequest("b", [0], Sampling(seed=1, max_tokens=8))])
        news = (await it.collect(5, 0)).progress
        assert news == [Progress("a", 1, Begun([2, 3], [-0.5, -0.5], [VersionSpan(0, 2, V1)]))]
        assert (await it.collect(5, 0)).progress == [], "it is told once"
        it._die("the scheduler was killed")
        replies = {r.id: r for r in (await it.collect(5, 0)).replies}
        assert replies["a"].token_ids == [1, 2, 3] and replies["a"].blame == "engine" and replies["b"].token_ids == []
        assert replies["a"].versions == [VersionSpan(0, 1, V0), VersionSpan(1, 3, V1)]
        assert it.stats().state == "dead" and not it._begun and not it._told

    asyncio.run(run())


def test_an_engine_that_gives_requests_back_has_their_kv_written_once_before_it_answers():
    class Writing(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, Any]] = []
            self.aborted: list[str] = []

        async def generate(self, request_id: str, ids: list[int], sampling: Sampling, grown: Any, pair: Any = None) -> dict[str, Any]:
            while request_id not in self.aborted:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.01 * len(self.aborted))
            return self.answer(ids, 2, {"type": "abort"})

        def abort(self, request_id: str) -> None:
            self.aborted.append(request_id)

        async def call(self, method: str, parameters: dict[str, Any], deadline_s: float) -> tuple[bool, str]:
            self.calls.append((method, parameters))
            await asyncio.sleep(0.05)
            return True, ""

    async def work() -> None:
        engine = RolloutEngine(EngineSpec(model=""))
        engine._sglang = sglang = Writing()
        waiting = asyncio.ensure_future(engine.collect(60.0))
        await asyncio.sleep(0.02)
        await engine.submit([EngineRequest(i, [4, 5], Sampling(max_tokens=9)) for i in ("a", "b", "c")])
        assert (await asyncio.wait_for(waiting, 1.0)).replies == [], "it would not hear how far they are for a minute"
        await engine.abort(["c"])
        assert [r.id for r in (await engine.collect(1.0)).replies] == ["c"] and not sglang.calls
        await engine.abort(["a", "b"], keep=True)
        replies: list[EngineReply] = []
        while len(replies) < 2:
            replies += (await engine.collect(1.0)).replies
            assert sglang.calls == [("milkweed_settle", {"within_s": 0.4})] * (1 if replies else len(sglang.calls))
        assert {r.id for r in replies} == {"a", "b"} and {r.finish_reason for r in replies} == {"abort"}
        assert all(r.token_ids == [6, 7] for r in replies)

    asyncio.run(work())


def test_no_requests_name_begins_with_anothers():
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        await asyncio.gather(*(router.sample([i]) for i in range(120)))
        names = [i for s in replicas[0].submits for i in s]
        assert len(names) == 120 and not [a for a in names for b in names if a is not b and b.startswith(a)]

    scenario(1, work)
