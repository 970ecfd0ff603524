"""KV in files below two engines, and KV that is kept while the weights change: no token from wrong or older KV."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollout_rig import VERSIONS, Rig

from milkweed.types import Completion, PolicyVersion, Sampling

pytestmark = pytest.mark.stack

UPDATES = 200
PAGE = 16
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
LIMIT = 5_000_000
TIER = ["rollout.kv_tier.memory_ratio=2", f"rollout.kv_tier.files_gb={LIMIT / 1e9}", "rollout.overlap_score_weight=0", "rollout.threads=1"]


def prompt(number: int) -> list[int]:
    return [(number * 37 + 11 * i + i * i // 7) % 250 + 8 for i in range(300)]


class Tiered(Rig):
    def stored(self, version: PolicyVersion) -> list[Path]:
        return list(Path("/dev/shm").glob(f"mw-{self.fleet.token}-kv/*/{version}/[!.]*"))

    def written(self, count: int) -> None:
        """Waits until `count` pages of the present version are there."""
        self.run(_until(lambda: len(self.stored(self.router.version)) >= count))

    def on(self, engine: int, ids: list[int], pages: int = 0) -> Completion:
        """What one engine answers, once `pages` files more are there."""
        before = len(self.stored(self.router.version))
        for number, e in enumerate(self.router.crew):
            e.standby = number != engine
        self.router.crew.by_load.rebuild()
        c = self.run(self.router.sample(ids, GREEDY))
        assert c.engine == f"rollout{engine}"
        if pages:
            self.written(before + pages)
        return c


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    yield from _up(Tiered(tmp_path_factory.mktemp("models"), more=TIER))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    yield from _up(Tiered(tmp_path_factory.mktemp("models"), replicas=3, more=TIER))


def _up(rig: Tiered) -> Iterator[Tiered]:
    try:
        rig.up()
        yield rig
    finally:
        rig.down()


def test_what_one_engine_computed_another_reads(rig: Tiered) -> None:
    one = rig.on(0, prompt(0), pages=300 // PAGE)
    assert one.cached_tokens == 0
    two = rig.on(1, prompt(0))
    assert two.token_ids == one.token_ids and rig.worst(two) < 1e-4
    assert two.cached_tokens == 288, "all but the last page of the prompt, which is not whole"
    again = rig.on(1, prompt(0))
    assert again.cached_tokens == 288 and again.token_ids == one.token_ids
    kv = rig.router.kv
    assert kv["rollout1"]["from_files"] == 288 and kv["rollout0"].get("from_files", 0) == 0
    assert kv["rollout1"]["read"] == 18 and kv["read_bytes"] == 18 * rig.stored(VERSIONS[0])[0].stat().st_size - 18 * 24


@pytest.mark.parametrize("damage", ["flipped", "cut short"])
def test_a_damaged_file_is_computed_anew_and_counted(rig: Tiered, damage: str) -> None:
    number = 1 if damage == "flipped" else 2
    old = set(rig.stored(VERSIONS[0]))
    one = rig.on(0, prompt(number), pages=300 // PAGE)
    bad = rig.router.kv["bad"]
    for file in set(rig.stored(VERSIONS[0])) - old:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw if damage == "flipped" else raw[: len(raw) // 2])
    two = rig.on(1, prompt(number))
    assert two.cached_tokens == 0 and two.token_ids == one.token_ids and rig.worst(two) < 1e-4
    assert rig.router.kv["bad"] > bad


def test_new_weights_leave_nothing_of_the_old_ones_in_any_tier(rig: Tiered) -> None:
    """Also for samples that run on through the update: their KV is of the new version, and so is what is stored of it."""

    async def through() -> list[Completion]:
        for e in rig.router.crew:
            e.standby = False
        rig.router.crew.by_load.rebuild()
        s = Sampling(max_tokens=300, ignore_eos=True)
        old = len(rig.stored(VERSIONS[0]))
        tasks = [asyncio.create_task(rig.router.sample(prompt(10 + i), s)) for i in range(4)]
        await _until(lambda: len(rig.stored(VERSIONS[0])) >= old + 4 * (300 // PAGE))  # all have begun
        report = await rig.router.update_weights({"host0": rig.stage(VERSIONS[1])}, VERSIONS[1])
        assert report.failed == {}
        return await asyncio.gather(*tasks)

    before = rig.on(0, prompt(3), pages=300 // PAGE)
    done = rig.run(through())
    assert {c.engine for c in done} == {"rollout0", "rollout1"} and max(len(c.versions) for c in done) == 2
    rig.written(4 * (599 // PAGE))
    after = rig.on(1, prompt(3), pages=300 // PAGE)
    assert after.cached_tokens == 0 and after.token_ids != before.token_ids
    assert rig.on(0, prompt(3)).cached_tokens == 288, "the new version's is read by others"
    for c in done:
        turn = rig.on(1 - int(c.engine[-1]), [*c.prompt_ids, *c.token_ids, 9])
        assert turn.cached_tokens == 592 and turn.version == VERSIONS[1] and rig.worst(turn) < 1e-4
    for c in (*done, before, after):
        assert rig.worst(c) < 1e-4
    rig.run(_until(lambda: not rig.stored(VERSIONS[0])))


@pytest.mark.slow
def test_samples_handed_over_compute_no_more_than_a_page_and_a_token(three: Tiered) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)

    async def handed_over() -> list[Completion]:
        tasks = [asyncio.ensure_future(three.router.sample(prompt(70 + i), greedy)) for i in range(3)]
        await asyncio.sleep(0.5)
        assert three.router.load["rollout2"] == 3, "they run still"
        for e in three.router.crew:
            e.standby = e.replica.name == "rollout0"
        three.router.crew.by_load.rebuild()
        await three.router.leave("rollout2", within_s=0)
        return await asyncio.gather(*tasks)

    three.on(2, prompt(0))
    before = three.router.kv["rollout1"]["computed"]
    done = three.run(handed_over())
    assert three.router.kv["rollout1"]["computed"] - before <= 3 * (PAGE + 1)
    assert {c.engine for c in done} == {"rollout1"}
    for i, c in enumerate(done):
        assert len(c.token_ids) == 300 and three.worst(c) < 1e-4
        assert c.token_ids[:12] == three.on(0, prompt(70 + i)).token_ids
        assert c.cached_tokens >= 300 - PAGE


@pytest.mark.slow
def test_what_an_engine_computed_outlives_it(three: Tiered) -> None:
    one = three.on(0, prompt(50), pages=300 // PAGE)

    async def some() -> asyncio.Task[list[Completion]]:
        s = Sampling(max_tokens=300, ignore_eos=True)
        return asyncio.ensure_future(asyncio.gather(*(three.router.sample(prompt(60 + i), s) for i in range(3))))

    before = len(three.stored(VERSIONS[0]))
    running = three.run(some())
    three.run(_until(lambda: len(three.stored(VERSIONS[0])) >= before + 3 * (300 // PAGE)))
    assert three.router.load["rollout0"] == 3, "they run still"
    os.kill(three.router.stats()["rollout0"].pids["scheduler0"], signal.SIGKILL)
    two = three.on(1, prompt(50))
    assert two.cached_tokens == 288 and two.token_ids == one.token_ids and three.worst(two) < 1e-4
    assert all(len(c.token_ids) == 300 and c.cached_tokens >= 288 and three.worst(c) < 1e-4 for c in three.run(running))


@pytest.mark.slow
def test_files_stay_below_their_limit(three: Tiered) -> None:
    """With the engine that is left, after the tests before."""
    before = three.router.kv["evicted"]
    for number in range(20, 40):
        three.on(1, prompt(number) * 3)
    time.sleep(1.5)  # what is on its way is written
    assert sum(f.stat().st_size for f in three.stored(VERSIONS[0])) <= LIMIT
    assert three.on(1, [7, 8, 9]).token_ids and three.router.kv["evicted"] > before


async def _until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not there():
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["own", "memory", "files", "pairs"])
def test_no_token_of_200_updates_comes_from_older_kv(tmp_path: Path, tier: str) -> None:
    """Samples with one long beginning, so that each finds it in the cache, and conversations that outlast versions."""
    small = ["rollout.kv_tier.memory_ratio=4", "rollout.engine.max_total_tokens=1200", "rollout.threads=1"]
    pairs = ["rollout.prefill.replicas=1", "rollout.threads=1"]  # KV that one engine computed and another decodes from
    more = {"own": [], "memory": small, "files": [*TIER, "rollout.kv_tier.files_gb=0.05"], "pairs": pairs}
    rig = Rig(tmp_path, replicas=1 if tier in ("memory", "pairs") else 2, more=more[tier])
    try:
        rig.up()
        images = [rig.stage(PolicyVersion(0, i)) for i in (0, 1)]
        begin, over = [*range(20, 220)], asyncio.Event()

        async def one(number: int) -> list[Completion]:
            done = []
            while not over.is_set():
                s = Sampling(max_tokens=12, ignore_eos=True)
                done.append(await rig.router.sample([*begin, 30 + number, len(done) % 200 + 30], s))
            return done

        async def talk(number: int) -> list[Completion]:
            done: list[Completion] = []
            while not over.is_set():
                first = [*begin[number:], *range(40, 80)]
                ids = [*done[-1].prompt_ids, *done[-1].token_ids, 77] if len(done) % 6 else first
                done.append(await rig.router.sample(ids, Sampling(max_tokens=20, ignore_eos=True)))
            return done

        async def update() -> None:
            for step in range(1, UPDATES + 1):
                version = PolicyVersion(0, step)
                staged = msgspec.structs.replace(images[step % 2], version=version)
                report = await rig.router.update_weights({"host0": staged}, version)
                assert report.failed == {}
                await asyncio.sleep(0.25 if tier == "memory" else 0.08)
            over.set()

        async def work() -> list[Any]:
            return await asyncio.gather(*(one(n) for n in range(4)), *(talk(n) for n in range(6 if tier == "memory" else 2)), update())

        *rows, _ = rig.run(work(), 400)
        done = [c for row in rows for c in row]
        assert len({s.version.step for c in done for s in c.versions}) > UPDATES * 0.8
        kv = rig.router.kv
        assert kv["reused"] > kv["computed"] / 4, "little was reused, so little was shown"
        assert tier == "own" or kv.get("moved_tokens" if tier == "pairs" else f"from_{tier}", 0) > 0
        assert any(len(c.versions) > 1 for c in done), "no sample outlasted a version"
        worst = max(rig.worst(c) for c in done)
        print(f"{len(done)} samples, worst {worst:.2e}, {({k: v for k, v in kv.items() if not isinstance(v, dict)})}")
        assert worst < 1e-4
    finally:
        rig.down()
