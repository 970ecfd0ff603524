"""Real engines on the real fleet: their tokens and log-probs are the model's, weights change whole and between two
steps, and a killed engine costs its samples nothing but time."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollout_rig import PROMPT, VERSIONS, Rig

from milkweed.config import load_mesh
from milkweed.config.mesh import EngineConfig
from milkweed.errors import ConfigError, DataError, FleetError, TransferError
from milkweed.fleet import Fleet
from milkweed.rollout import Router, Teacher
from milkweed.runs.health import Health
from milkweed.types import Completion, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from strike_blows import flip_found  # noqa: E402

pytestmark = pytest.mark.stack

@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("models"))
    try:
        rig.up()
        yield rig
    finally:
        rig.down()


def test_greedy_tokens_are_those_of_transformers(rig: Rig) -> None:
    import torch

    c = rig.run(rig.router.sample(PROMPT, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)))
    want = rig.model(VERSIONS[0]).generate(
        torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :]
    assert c.token_ids == want.tolist()
    assert c.finish_reason == "length" and rig.worst(c) < 1e-4


def test_logprobs_are_those_of_the_full_distribution_at_the_sampling_temperature(rig: Rig) -> None:
    async def work() -> list[Completion]:
        asks = [Sampling(temperature=t, max_tokens=20, ignore_eos=True) for t in (1.0, 0.7, 1.3, 0.0)]
        asks += [Sampling(temperature=0.7, top_p=0.9, top_k=20, max_tokens=20, ignore_eos=True)]
        # side by side in one batch: rows must not borrow each other's temperature
        return await asyncio.gather(*(rig.router.sample([*PROMPT, i], s) for i in range(6) for s in asks))

    for c in rig.run(work()):
        assert rig.worst(c) < 1e-4, c.sampling


def test_a_teacher_on_engines_says_of_given_tokens_what_transformers_says(rig: Rig) -> None:
    """Packed sequences of several lengths, one of a single token, and padding; asked twice, so from a warm cache too."""
    import torch

    from milkweed.types import Batch

    rows, spans = torch.randint(40, 80, (2, 16)), [(0, 0, 7), (0, 7, 8), (0, 8, 14), (1, 0, 16)]
    segments = torch.full((2, 16), -1)
    for number, (row, start, end) in enumerate(spans):
        segments[row, start:end] = number
    nothing = torch.zeros(2, 16)
    batch = Batch(rows, nothing.long(), segments, nothing.bool(), nothing, nothing, nothing)
    teacher = Teacher(rig.router)
    want, best = torch.zeros(2, 16), torch.zeros(2, 16, 5)
    for row, start, end in spans:
        with torch.no_grad():
            said = rig.model(VERSIONS[0])(rows[row : row + 1, start:end]).logits[0, :-1].log_softmax(-1)
        want[row, start + 1 : end] = said.gather(1, rows[row, start + 1 : end, None])[:, 0]
        best[row, start + 1 : end] = said.topk(5).values
    for _ in range(2):
        ids, top = rig.run(teacher.top_logprobs(batch, 5))
        torch.testing.assert_close(rig.run(teacher.logprobs(batch)), want, rtol=0, atol=1e-4)
        torch.testing.assert_close(top, best, rtol=0, atol=1e-4)
    with torch.no_grad():
        assert ids[1, 1:].equal(rig.model(VERSIONS[0])(rows[1:]).logits[0, :-1].topk(5).indices)
    batch.temperature = 0.5
    with pytest.raises(ConfigError, match="temperature 1"):
        rig.run(teacher.logprobs(batch))


def test_text_stops_and_finish_reasons(rig: Rig) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(rig.folders[0])
    free = rig.run(rig.router.sample(PROMPT, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)))
    assert free.text == tokenizer.decode(free.token_ids, skip_special_tokens=True)
    third = free.token_ids[2]
    first = free.token_ids.index(third)
    by_id = rig.run(rig.router.sample(PROMPT, Sampling(temperature=0.0, max_tokens=24, stop_token_ids=(third,))))
    assert by_id.finish_reason == "stop" and by_id.token_ids == free.token_ids[: first + 1]
    assert rig.worst(by_id) < 1e-4
    word = next((ch for ch in free.text[3:] if ch.isascii() and ch.isprintable()), None)
    assert word, "the model says nothing printable; choose another prompt"
    until = Sampling(temperature=0.0, max_tokens=24, stop=(word,), ignore_eos=True)
    by_text = rig.run(rig.router.sample(PROMPT, until))
    assert by_text.finish_reason == "stop" and by_text.text == free.text[: free.text.index(word)]
    assert by_text.token_ids == free.token_ids[: len(by_text.token_ids)] and rig.worst(by_text) < 1e-4


def test_a_request_that_does_not_fit_names_its_sample_and_disturbs_no_other(rig: Rig) -> None:
    async def work() -> list[Any]:
        s = Sampling(max_tokens=8, ignore_eos=True)
        bad = [rig.router.sample([1] * 5000, s, name="task 17"), rig.router.sample([], s, name="task 18")]
        bad += [rig.router.sample(PROMPT, Sampling(seed=1), name="task 19")]
        return await asyncio.gather(*bad, rig.router.sample(PROMPT, s), return_exceptions=True)

    *bad, good = rig.run(work())
    for error, words in zip(bad, ("task 17.*5000 tokens", "task 18.*empty", "task 19.*seed"), strict=True):
        assert isinstance(error, DataError)
        with pytest.raises(DataError, match=words):
            raise error
    assert len(good.token_ids) == 8
    # what exceeds the context ends there instead
    full = rig.run(rig.router.sample([40] * 1000, Sampling(max_tokens=500, ignore_eos=True)))
    assert full.finish_reason == "length" and len(full.token_ids) < 25


def test_a_cancelled_sample_stops_in_its_engine(rig: Rig) -> None:
    async def work() -> None:
        before = rig.router.tokens
        task = asyncio.create_task(rig.router.sample(PROMPT, Sampling(max_tokens=900, ignore_eos=True)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(40):
            await asyncio.sleep(0.1)
            if all(s.running == 0 for s in rig.router.stats().values()) and rig.router.tokens > before:
                break
        assert rig.router.tokens - before < 900
        assert rig.router.load == {"rollout0": 0, "rollout1": 0, "": 0}

    rig.run(work())


def _prefilled(rig: Rig) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, dict) else v for k, v in rig.router.kv.items()}


def test_a_group_computes_its_prompt_once_on_one_engine_and_across_two(rig: Rig) -> None:
    """SGLang's own counters, for two groups that come together, and for one whose prompt is there already."""
    async def groups(*starts: int) -> list[Completion]:
        asks = [[*range(start, start + 50)] * 10 for start in starts]
        s = Sampling(max_tokens=8, ignore_eos=True)
        return await asyncio.gather(*(rig.router.sample(ids, s) for ids in asks for _ in range(8)))

    before = _prefilled(rig)
    done, after = rig.run(groups(20, 150)), _prefilled(rig)
    for group in (done[:8], done[8:]):
        assert len({c.engine for c in group}) == 1, "a long prompt keeps its group together"
        assert sorted(c.cached_tokens for c in group) == [0, *[499] * 7], "one computes it, and a token each the others"
    assert {c.engine for c in done} == {"rollout0", "rollout1"}
    for engine in ("rollout0", "rollout1"):
        assert after[engine]["computed"] - before[engine]["computed"] == 507
        assert after[engine]["reused"] - before[engine]["reused"] == 7 * 499
    assert after["prefix_hits"] - before["prefix_hits"] == 14
    again = rig.run(groups(20))
    assert {c.engine for c in again} == {done[0].engine} and {c.cached_tokens for c in again} == {499}
    for c in (*done[::5], again[0]):
        assert rig.worst(c) < 1e-4


def test_a_conversation_of_six_turns_computes_nothing_but_the_new_turn(rig: Rig) -> None:
    """Three talk beside each other, so that a turn could go to the wrong engine."""
    async def talk(number: int) -> list[Completion]:
        ids, turns = [*range(20 + number, 120 + number)], []
        for turn in range(6):
            turns.append(await rig.router.sample(ids, Sampling(max_tokens=10, ignore_eos=True)))
            ids = [*ids, *turns[-1].token_ids, *range(130 + turn, 150 + turn)]
        return turns

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(talk(n) for n in range(3)))

    for turns in rig.run(all_of_them()):
        assert len({c.engine for c in turns}) == 1
        for before, c in zip(turns, turns[1:]):
            # the KV of the last token sampled was never computed
            assert c.cached_tokens == len(before.prompt_ids) + len(before.token_ids) - 1
        assert rig.worst(turns[-1]) < 1e-4


def test_weights_change_under_running_samples_and_every_token_knows_its_version(rig: Rig) -> None:
    async def work() -> list[Completion]:
        s = Sampling(max_tokens=400, ignore_eos=True)
        tasks = [asyncio.create_task(rig.router.sample([*PROMPT, i], s)) for i in range(8)]
        for version in VERSIONS[1:4]:
            await asyncio.sleep(0.35)
            report = await rig.router.update_weights({"host0": rig.stage(version)}, version)
            assert report.failed == {} and rig.router.version == version
            assert set(rig.router.versions().values()) == {version}
        return await asyncio.gather(*tasks)

    done = rig.run(work(), 120)
    assert {c.engine for c in done} == {"rollout0", "rollout1"}
    assert max(len(c.versions) for c in done) >= 3
    for c in done:
        assert rig.worst(c) < 1e-4
    again = rig.run(rig.router.sample([*PROMPT, 0], Sampling(max_tokens=8)))
    assert again.cached_tokens > 0 and again.version == VERSIONS[3] and rig.worst(again) < 1e-4


def test_a_commit_that_fails_leaves_whole_weights_or_serves_nothing(rig: Rig) -> None:
    now, new = rig.router.versions()["rollout0"], rig.stage(VERSIONS[4])
    assert now == VERSIONS[3]
    before = rig.run(rig.router.checksums())
    assert before["rollout0"] == before["rollout1"]
    torn = msgspec.structs.replace(new, digest=new.digest ^ 1)
    other = msgspec.structs.replace(new, tensors=new.tensors[1:])
    for staged, fault, words in (
        (torn, "", "nothing changed.*digest"),
        (other, "", "nothing changed.*missing"),
        (new, "prepare", "nothing changed"),
        (new, "copy", "rolled back"),
    ):
        report = rig.commit_on("rollout0", staged, fault)
        assert not report.ok and report.state == "serving" and report.version == now
        assert re.search(words, report.message), report.message
    assert rig.run(rig.router.checksums()) == before
    with pytest.raises(TransferError, match="digest"):
        rig.run(rig.router.update_weights({"host0": torn}, torn.version))
    with pytest.raises(FleetError, match="digest"):
        rig.run(rig.router.sample(PROMPT))

    # neither version is whole: nothing is served, until a good commit
    assert rig.commit_on("rollout0", new, "copy,roll back").state == "broken"
    assert not rig.commit_on("rollout0", new, "prepare").ok
    report = rig.run(rig.router.update_weights({"host0": new}, new.version))
    assert report.failed == {}
    sums = rig.run(rig.router.checksums())
    assert sums["rollout0"] == sums["rollout1"] != before["rollout0"]
    for i in range(4):
        c = rig.run(rig.router.sample([*PROMPT, i], Sampling(max_tokens=16, ignore_eos=True)))
        assert c.version == VERSIONS[4] and rig.worst(c) < 1e-4
        assert i > 0 or c.cached_tokens == 0, "the prefix cache of old weights was kept"


def test_the_checksum_is_that_of_an_engine_started_from_the_same_folder(rig: Rig) -> None:
    """rollout1 started from folder `a`, went through commits, and serves `a` again: version 4."""
    assert rig.router.version == VERSIONS[4]
    committed = rig.run(rig.router.checksums())["rollout1"]

    async def fresh() -> dict[str, str]:
        mesh = load_mesh("local", ["rollout.replicas=1"])
        async with await Fleet.start(mesh) as fleet:
            router = await Router.spawn(fleet, str(rig.folders[0]))
            try:
                return (await router.checksums())["rollout0"]
            finally:
                await router.close()

    assert rig.run(fresh(), 240) == committed


def test_a_bit_that_flips_in_the_weights_of_an_engine_is_found_and_the_next_version_mends_it(rig: Rig) -> None:
    health = Health(rig.router, lambda index: False, EngineConfig(look_s=0))
    assert rig.run(health.wrong()) == []
    staged, pid = rig.stage(VERSIONS[4]), rig.router.stats()["rollout1"].pids["scheduler0"]
    dice, weights = random.Random(0), Path(staged.path).read_bytes()
    assert any(flip_found(weights, pid, dice) for _ in range(50)), "its weights were not found"
    wrong = {engine.replica.name: why for engine, why in rig.run(health.wrong())}
    assert sorted(wrong) == ["rollout0", "rollout1"], "of two nobody can say which it is"
    assert "its weights of version 0.4 have another checksum than those of" in wrong["rollout1"]
    assert rig.run(rig.router.update_weights({"host0": rig.stage(VERSIONS[5])}, VERSIONS[5])).failed == {}
    assert rig.run(health.wrong()) == []


def test_the_samples_of_a_killed_engine_go_on_elsewhere_from_their_tokens(rig: Rig) -> None:
    async def work() -> tuple[list[Completion], float]:
        s = Sampling(max_tokens=600, ignore_eos=True)
        tasks = [asyncio.create_task(rig.router.sample([*PROMPT, i], s)) for i in range(6)]
        await asyncio.sleep(0.3)
        assert rig.router.load["rollout0"] == rig.router.load["rollout1"] == 3
        killed = rig.router.crew.find("rollout0")
        while min(len(p.begun.token_ids) if p.begun else 0 for p in killed.pending.values()) < 32:
            await asyncio.sleep(0.02)
        stats, start = rig.router.stats()["rollout0"], time.monotonic()
        os.kill(stats.pids["scheduler0"], signal.SIGKILL)
        while rig.router.load["rollout0"]:
            await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks), time.monotonic() - start

    before = rig.router.stats()["rollout1"].tokens
    done, _ = rig.run(work(), 120)
    carried = 6 * 600 - (rig.router.stats()["rollout1"].tokens - before)
    assert 3 * 32 <= carried < 3 * 600, "what the killed one had sampled was not sampled again"
    assert {c.engine for c in done} == {"rollout1"}
    assert all(len(c.token_ids) == 600 and rig.worst(c) < 1e-4 for c in done)
    assert "SIGKILL" in rig.router.stats()["rollout0"].cause
    assert rig.router.load == {"rollout0": 0, "rollout1": 0, "": 0}
    # the whole process this time, and nobody is left
    task = rig.runner.get_loop().create_task(rig.router.sample(PROMPT, Sampling(max_tokens=900, ignore_eos=True)))
    rig.run(asyncio.sleep(0.3))
    os.kill(rig.router.stats()["rollout1"].pids["engine"], signal.SIGKILL)
    with pytest.raises(FleetError, match="no engine can sample"):
        rig.run(asyncio.wait_for(task, 20))


@pytest.mark.slow
def test_two_tensor_parallel_ranks_sample_and_commit_as_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replicas=1, tensor_parallel=2)
    try:
        rig.up()
        s = Sampling(max_tokens=300, ignore_eos=True)

        async def work() -> list[Completion]:
            tasks = [asyncio.create_task(rig.router.sample([*PROMPT, i], s)) for i in range(4)]
            await asyncio.sleep(0.5)
            await rig.router.update_weights({"host0": rig.stage(VERSIONS[1])}, VERSIONS[1])
            return await asyncio.gather(*tasks)

        done = rig.run(work(), 180)
        assert all(rig.worst(c) < 1e-4 for c in done)
        assert max(len(c.versions) for c in done) == 2
        assert list(rig.run(rig.router.checksums())["rollout0"]) == ["rank0", "rank1"]
        assert "rolled back" in rig.commit_on("rollout0", rig.stage(VERSIONS[2]), "copy").message
        c = rig.run(rig.router.sample(PROMPT, Sampling(max_tokens=16, ignore_eos=True)))
        assert c.version == VERSIONS[1] and rig.worst(c) < 1e-4
    finally:
        rig.down()
