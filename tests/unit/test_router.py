"""The router over engines that are plain objects: placing, re-sending, back-pressure, deadlines, stale engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from milkweed.errors import ConfigError, DataError, DeadlineExceeded, FleetError, PeerDied, TransferError
from milkweed.rollout.protocol import (
    Collected,
    CommitReport,
    EngineReply,
    EngineStats,
    SampleError,
    decode_requests,
    encode,
)
from milkweed.rollout.router import Router
from milkweed.rollout.teacher import Teacher
from milkweed.transfer.manifest import Staged
from milkweed.types import Batch, PolicyVersion, Sampling, VersionSpan

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)


class FakeReplica:
    """Answers each request with its own prompt once `gate` is open."""

    def __init__(self, index: int) -> None:
        self.name, self.index, self.host = f"rollout{index}", index, SimpleNamespace(name="host0")
        self.stats = EngineStats(version=V0, state="serving")
        self.gate, self.news, self.failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.held: dict[str, Any] = {}
        self.submits: list[list[str]] = []
        self.aborted: list[str] = []
        self.stopped = False
        self.failure: FleetError | None = None
        self.commits: list[CommitReport] = []
        self.answer = lambda r: EngineReply(
            id=r.id, token_ids=r.token_ids, logprobs=[-1.0] * len(r.token_ids),
            versions=[VersionSpan(0, len(r.token_ids), self.stats.version)],
        )  # fmt: skip

    async def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        if self.failure:
            raise self.failure
        work = asyncio.ensure_future(getattr(self, endpoint)(*args))
        fail = asyncio.ensure_future(self.failed.wait())
        await asyncio.wait({work, fail}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        fail.cancel()
        if self.failure:
            work.cancel()
            raise self.failure
        return work.result()

    def die(self) -> None:
        self.failure = PeerDied(self.name, "died", "killed")
        self.failed.set()

    async def submit(self, raw: bytes) -> None:
        requests = decode_requests(raw)
        self.submits.append([r.id for r in requests])
        self.held |= {r.id: r for r in requests}
        self.news.set()

    async def collect(self, max_wait_s: float, linger_s: float) -> bytes:
        while not (self.held and self.gate.is_set()) and self.stats.state == "serving":
            self.news.clear()
            if self.held:
                await self.gate.wait()
            else:
                await self.news.wait()
        held, self.held = self.held, {}
        self.stats.busy_s += 1.0
        return encode(Collected([self.answer(r) for r in held.values()], self.stats))

    async def abort(self, ids: list[str]) -> None:
        self.aborted += ids

    async def commit(self, raw: bytes, deadline_s: float, fault: str = "") -> bytes:
        report = self.commits.pop(0)
        self.stats.version, self.stats.state = report.version, report.state
        return encode(report)

    async def close(self) -> None:
        return None

    async def stop(self) -> None:
        self.stopped = True


def staged(version: PolicyVersion) -> dict[str, Staged]:
    return {"host0": Staged(version, "", 0, 0, 0, [])}


def scenario(count: int, work: Any, **options: Any) -> None:
    async def run() -> None:
        replicas = [FakeReplica(i) for i in range(count)]
        router = Router(replicas, [r.stats for r in replicas], **options)
        try:
            async with asyncio.timeout(10):
                await work(router, replicas)
        finally:
            await router.close()
        assert all(r.stopped for r in replicas)

    asyncio.run(run())


def test_samples_of_one_turn_travel_in_one_message_and_are_spread_evenly() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        done = await asyncio.gather(*(router.sample([i]) for i in range(40)))
        assert [c.token_ids for c in done] == [[i] for i in range(40)]
        assert [len(r.submits) for r in replicas] == [1, 1]
        assert [len(r.submits[0]) for r in replicas] == [20, 20]

    scenario(2, work)


def test_a_teacher_asks_for_each_packed_sequence_and_puts_the_answers_where_its_tokens_stand() -> None:
    import torch

    def score(r: Any) -> EngineReply:
        assert r.score is not None and r.sampling == Sampling()
        rest = r.token_ids[1:]
        return EngineReply(
            id=r.id, logprobs=[0.0] + [-0.5 * t for t in rest],
            top_ids=[[t, t + 1][: r.score] for t in rest], top_logprobs=[[-1.0, -2.0][: r.score] for _ in rest],
        )  # fmt: skip

    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.answer = score
        tokens = torch.tensor([[3, 4, 5, 6, 7, 0], [8, 9, 0, 0, 0, 0]])
        segments = torch.tensor([[1, 1, 0, 0, 0, -1], [2, 2, -1, -1, -1, -1]])
        nothing = torch.zeros(2, 6)
        batch = Batch(tokens, nothing.long(), segments, nothing.bool(), nothing, nothing, nothing)
        teacher = Teacher(router)
        logprobs = await teacher.logprobs(batch)
        assert logprobs.tolist() == [[0, -2.0, 0, -3.0, -3.5, 0], [0, -4.5, 0, 0, 0, 0]]
        ids, top = await teacher.top_logprobs(batch, 2)
        assert ids[0].tolist() == [[0, 0], [4, 5], [0, 0], [6, 7], [7, 8], [0, 0]] and ids[1, 1].tolist() == [9, 10]
        assert top[0, 3].tolist() == [-1.0, -2.0] and not top[segments < 0].any()
        with pytest.raises(ConfigError, match="reference"):
            await teacher.logprobs(Batch(tokens, *[nothing.long(), segments, nothing.bool()], *[nothing] * 3, temperature=0.5))
        with pytest.raises(ConfigError, match="k must be"):
            await teacher.top_logprobs(batch, 0)

    scenario(2, work)


def test_an_engine_gets_no_more_than_its_bound_and_the_rest_wait_in_order() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        (replica,) = replicas
        replica.gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(10)]
        await asyncio.sleep(0.05)
        assert router.load == {"rollout0": 4, "": 6}
        replica.gate.set()
        assert [(await t).token_ids for t in tasks] == [[i] for i in range(10)]
        assert max(len(s) for s in replica.submits) <= 4

    scenario(1, work, max_in_flight=4)


def test_only_the_dead_engines_samples_are_sent_elsewhere() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(8)]
        await asyncio.sleep(0.05)
        lost = set(replicas[0].held)
        replicas[0].die()
        await asyncio.sleep(0.05)
        assert lost and set(replicas[1].submits[1]) == lost
        replicas[1].gate.set()
        done = await asyncio.gather(*tasks)
        assert {c.engine for c in done} == {"rollout1"}
        assert replicas[0].stopped
        assert "rollout0" not in router.versions()

    scenario(2, work)


def test_with_no_engine_left_every_waiter_is_told_at_once() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        replicas[0].gate.clear()
        tasks = [asyncio.create_task(router.sample([i])) for i in range(6)]
        await asyncio.sleep(0.05)
        replicas[0].die()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, FleetError) and "killed" in str(e) for e in errors)
        with pytest.raises(FleetError, match="killed"):
            await router.sample([1])

    scenario(1, work, max_in_flight=2)


def test_a_sample_that_engines_die_under_is_given_up() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        for r in replicas:
            r.gate.clear()
        task = asyncio.create_task(router.sample([1], name="task 9"))
        await asyncio.sleep(0.02)
        for _ in range(3):
            next(r for r in replicas if r.held and not r.failure).die()
            await asyncio.sleep(0.02)
        with pytest.raises(SampleError, match="task 9"):
            await task
        assert sum(r.failure is None for r in replicas) == 1

    scenario(4, work)


def test_a_cancelled_or_late_sample_is_stopped_in_its_engine() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        (replica,) = replicas
        replica.gate.clear()
        task = asyncio.create_task(router.sample([1]))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(DeadlineExceeded, match="task 3"):
            await router.sample([2], name="task 3", deadline_s=0.05)
        await asyncio.sleep(0.02)
        assert replica.aborted == [i for s in replica.submits for i in s]
        assert router.load == {"rollout0": 0, "": 0}
        replica.gate.set()
        assert (await router.sample([3])).token_ids == [3]

    scenario(1, work)


def test_a_request_that_fails_fails_alone() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        good = replicas[0].answer
        bad = {1: "request", 2: "sampling"}
        replicas[0].answer = lambda r: (
            EngineReply(id=r.id, error=f"sample {r.name}: no", blame=bad[r.token_ids[0]])
            if r.token_ids[0] in bad
            else good(r)
        )
        tasks = [router.sample([i], name=f"t{i}") for i in range(4)]
        a, b, c, d = await asyncio.gather(*tasks, return_exceptions=True)
        assert a.token_ids == [0] and d.token_ids == [3]
        assert isinstance(b, DataError) and "t1" in str(b)
        assert isinstance(c, SampleError) and "t2" in str(c)

    scenario(1, work)


def test_an_engine_that_missed_a_commit_gets_no_samples_until_one_succeeds() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        replicas[0].commits = [
            CommitReport(ok=False, state="serving", version=V0, message="bad digest"),
            CommitReport(ok=True, state="serving", version=V2, seconds=0.5),
        ]
        replicas[1].commits = [
            CommitReport(ok=True, state="serving", version=V1, seconds=0.25),
            CommitReport(ok=True, state="serving", version=V2),
        ]
        report = await router.update_weights(staged(V1), V1)
        assert report.failed == {"rollout0": "bad digest"} and report.seconds == 0.25
        assert router.version == V1
        done = await asyncio.gather(*(router.sample([i]) for i in range(6)))
        assert {c.engine for c in done} == {"rollout1"}
        assert (await router.update_weights(staged(V2), V2)).failed == {}
        done = await asyncio.gather(*(router.sample([i]) for i in range(6)))
        assert {c.engine for c in done} == {"rollout0", "rollout1"}

    scenario(2, work)


def test_a_version_that_no_engine_takes_is_an_error_and_nothing_serves_old_weights() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        refused = CommitReport(ok=False, state="serving", version=V0, message="bad digest")
        replicas[0].commits = [refused, CommitReport(ok=True, state="serving", version=V1)]
        with pytest.raises(TransferError, match="bad digest"):
            await router.update_weights(staged(V1), V1)
        with pytest.raises(TransferError, match="nothing was staged on its host host0"):
            await router.update_weights({}, V1)
        with pytest.raises(FleetError, match="nothing was staged"):
            await router.sample([1])
        await router.update_weights(staged(V1), V1)
        assert (await router.sample([1])).version == V1

    scenario(1, work)


def test_a_broken_engine_gives_its_samples_to_another() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        good = replicas[0].answer
        replicas[0].stats.cause = "half a version"
        replicas[0].answer = lambda r: EngineReply(id=r.id, error="half a version", blame="engine")
        replicas[0].gate.clear()
        task = asyncio.create_task(router.sample([5]))
        await asyncio.sleep(0.02)
        assert replicas[0].held
        replicas[0].stats.state = "broken"
        replicas[0].gate.set()
        assert (await task).engine == "rollout1"
        assert (await router.sample([6])).engine == "rollout1"
        replicas[0].answer = good

    scenario(2, work)


def test_busy_time_is_that_of_the_engine_busy_longest() -> None:
    async def work(router: Router, replicas: list[FakeReplica]) -> None:
        before = router.busy_s
        await asyncio.gather(*(router.sample([i]) for i in range(4)))
        assert router.busy_s - before == 1.0
        await router.sample([1])
        assert router.busy_s - before == 2.0

    scenario(2, work)


def test_messages_survive_encoding() -> None:
    reply = EngineReply(id="a", token_ids=[1], logprobs=[-0.5], versions=[VersionSpan(0, 1, V1)], text="x")
    raw = encode(Collected([reply], EngineStats(version=V1, state="serving")))
    assert msgspec.msgpack.decode(raw, type=Collected).replies == [reply]
    assert Sampling().full_support


def test_the_first_samples_of_many_leave_while_the_others_are_still_being_asked_for():
    class Post(FakeReplica):
        """Notes when a message was posted, which a replica does before it is waited for."""

        def call_one(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
            if endpoint == "submit":
                posted.append((len(asked), len(decode_requests(args[0]))))
            return super().call_one(endpoint, *args, deadline_s=deadline_s)

    posted: list[tuple[int, int]] = []
    asked: list[int] = []

    async def run() -> None:
        replica = Post(0)
        router = Router([replica], [replica.stats])

        async def one(number: int) -> None:
            asked.append(number)
            await router.sample([number])

        await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(100))), 10)
        await router.close()

    asyncio.run(run())
    assert posted == [(32, 32), (64, 32), (96, 32), (100, 4)]
