"""The ledger under kills: whatever is cut off its files after the last checkpoint, the sums agree and nothing is doubled."""

import asyncio
import os
import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from flow_support import World, run_virtual
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from milkweed.cli import main as milkweed
from milkweed.data import PromptStream
from milkweed.data.ledger import Issue, Ledger, audit
from milkweed.data.ledger.records import pack_trajectory, unpack_trajectory
from milkweed.data.ledger.segments import Segments, scan
from milkweed.errors import DataError
from milkweed.runs.generator import Limits
from milkweed.runs.lineage import Lineage
from milkweed.types import PolicyVersion, Sampling, Trajectory, Turn, VersionSpan


def trajectory(index=0, n=20, version=PolicyVersion(), **more):
    return Trajectory(
        token_ids=list(range(n)),
        loss_mask=[i % 2 == 1 for i in range(n)],
        logprobs=[-i / 8 for i in range(n)],
        versions=[VersionSpan(0, n, version)],
        turns=[Turn("assistant", 0, n)],
        finish_reason="stop",
        sampling=Sampling(),
        index=index,
        **{"reward": 1.0, **more},
    )


def issue(number, samples=2, **more):
    return Issue(**{"number": number, "group": f"g{number}", "stream": "train", "position": number - 1, "epoch": 0, "seed": 0, "prompt_id": f"p{number}", "samples": samples, **more})


def kill(folder: Path, place: Path, dice: random.Random, durable: dict[str, int]) -> None:
    """`place` becomes what `folder` is at this moment, less what a killed machine may lose: any of the bytes written to
    a segment or the index's log since they were last made durable."""
    shutil.copytree(folder, place)
    for path in [*place.glob("segments/*.seg"), *place.glob("*-wal")]:
        least, size = durable.get(path.name, 0), path.stat().st_size
        if size > least and dice.random() < 0.7:
            os.truncate(path, dice.randint(least, size))
    (place / "index.sqlite-shm").unlink(missing_ok=True)


def sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in [*folder.glob("segments/*.seg"), *folder.glob("*-wal")]}


class Machine(RuleBasedStateMachine):
    """A run of groups of two: issued, finished, dropped, trained, checkpointed, killed, in any order that a loop may
    choose. What the ledger says after every kill is checked against what was certain."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.lives = 0

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.dice = random.Random(seed)
        self.saved = PolicyVersion(0, 0)
        self.trained_for_good = set()
        self._open(self.root / "0")

    def _open(self, folder):
        self.folder = folder
        self.ledger = Ledger(folder, threaded=False, segment_bytes=4000)
        self.step = self.saved.step
        resumed = self.ledger.resume(PolicyVersion(self.lives, self.step))
        assert audit(folder).agrees, audit(folder).text()
        self.number = resumed.next_number - 1
        self.running, self.buffered, self.unsaved = set(), set(), set()
        for h in resumed.held:
            self.running |= {(h.issue.number, s) for s in h.unfinished}
            self.buffered |= {(h.issue.number, s) for s in h.finished}
            for s, t in h.finished.items():
                assert t.token_ids == trajectory().token_ids and t.index == s
        assert not (self.running | self.buffered) & self.trained_for_good, "what a checkpoint holds is not held again"
        again = {n for numbers in resumed.again.values() for n in numbers}
        assert again <= {n for n, _ in self.running | self.buffered}, "what is trained again is held"
        self.durable = self._sizes()

    def _sizes(self):
        self.ledger._write(True)
        return sizes(self.folder)

    @rule()
    def issue(self):
        self.number += 1
        self.ledger.issue([issue(self.number)])
        self.running |= {(self.number, 0), (self.number, 1)}

    @rule(n=st.integers(1, 5))
    def finish(self, n):
        for number, sample in sorted(self.running)[:n]:
            self.running.remove((number, sample))
            if self.dice.random() < 0.2:
                self.ledger.finish(number, trajectory(sample, reward=None, dropped="RewardError: it raised"))
            else:
                self.ledger.finish(number, trajectory(sample))
                self.buffered.add((number, sample))

    @rule()
    def drop(self):
        if self.buffered:
            number, sample = self.dice.choice(sorted(self.buffered))
            self.ledger.drop(number, [sample], "stale")
            self.buffered.remove((number, sample))

    @rule(n=st.integers(1, 4))
    def train(self, n):
        chosen = sorted(self.buffered)[:n]
        if chosen:
            self.step += 1
            self.ledger.train(PolicyVersion(self.lives, self.step), [(number, sample, 0, 10) for number, sample in chosen])
            self.buffered -= set(chosen)
            self.unsaved |= set(chosen)

    @rule()
    def write(self):
        self.ledger._write(False)

    @rule(recorded=st.booleans())
    def checkpoint(self, recorded):
        """Also with the kill between the checkpoint's end and the ledger's word of it."""
        self.durable = self._sizes()
        self.saved = PolicyVersion(self.lives, self.step)
        self.trained_for_good |= self.unsaved
        if recorded:
            self.ledger.checkpoint(self.saved)
            self.unsaved = set()
        else:
            self.kill()

    @rule()
    def kill(self):
        self.lives += 1
        place = self.root / str(self.lives)
        kill(self.folder, place, self.dice, self.durable)
        self._abandon()
        self._open(place)

    @invariant()
    def agrees(self):
        if self.dice.random() < 0.2:
            self.ledger._write(False)
            report = audit(self.folder)
            assert report.agrees, report.text()
            assert report.issued == 2 * self.number
            assert (report.running, report.buffered) == (len(self.running), len(self.buffered))

    def _abandon(self):
        self.ledger._waiting.clear()
        self.ledger.close()
        shutil.rmtree(self.folder)

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            assert audit(self.folder).agrees
        shutil.rmtree(self.root)


Machine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],  # every step writes files, so shrinking would take minutes
)
TestKills = Machine.TestCase


def test_a_trajectory_comes_back_as_it_was_with_all_its_fields():
    t = trajectory(1, reward_parts={"form": 0.5}, completion="ok", id="g/1", seed=7, segments=[trajectory(1)])
    assert unpack_trajectory(pack_trajectory(t)) == t


def test_a_torn_record_is_found_by_its_checksum_and_cut(tmp_path):
    segments = Segments(tmp_path)
    places = [segments.append(bytes([i]) * 50) for i in range(3)]
    segments.close()
    path = segments.path(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(list(scan(path))) == 2
    again = Segments(tmp_path)
    assert again.cut({0: len(data)}) == 62 and again.read(*places[1]) == bytes([1]) * 50
    with pytest.raises(DataError, match="00000000.seg.*byte 124"):
        again.read(*places[2])


def test_audit_names_what_is_wrong_and_ends_with_1(tmp_path, capsys):
    ledger = Ledger(tmp_path / "ledger", threaded=False)
    ledger.resume(PolicyVersion())
    ledger.issue([issue(1), issue(2)])
    ledger.finish(1, trajectory(0))
    ledger.close()
    assert milkweed(["audit", str(tmp_path)]) == 0
    assert "issued 4 = trained 0 + dropped 0 + held 4" in capsys.readouterr().out
    with sqlite3.connect(tmp_path / "ledger" / "index.sqlite") as index:
        index.execute("DELETE FROM held WHERE number=2 AND sample=1")
    assert milkweed(["audit", str(tmp_path)]) == 1
    assert "issued 4, but trained + dropped + held is 3" in capsys.readouterr().out
    assert milkweed(["audit", str(tmp_path / "elsewhere")]) == 1


def test_a_ledger_that_knows_less_than_the_checkpoint_is_refused(tmp_path):
    ledger = Ledger(tmp_path, threaded=False)
    ledger.resume(PolicyVersion())
    ledger.close()
    ledger = Ledger(tmp_path, threaded=False)
    with pytest.raises(DataError, match="checkpoint is of step 7"):
        ledger.resume(PolicyVersion(1, 7))
    with pytest.raises(DataError, match="incarnation"):
        ledger.resume(PolicyVersion(0, 0))
    ledger.close()


def test_going_back_further_than_the_last_checkpoint_holds_again_what_that_had_counted(tmp_path):
    """The newest checkpoint may turn out to be unreadable."""
    ledger = Ledger(tmp_path, threaded=False)
    ledger.resume(PolicyVersion())
    for n in range(1, 5):
        ledger.issue([issue(n)])
        for s in range(2):
            ledger.finish(n, trajectory(s))
        ledger.train(PolicyVersion(0, n), [(n, s, 0, 10) for s in range(2)])
        ledger.checkpoint(PolicyVersion(0, n))
    ledger.close()
    assert audit(tmp_path).trained == 8
    ledger = Ledger(tmp_path, threaded=False)
    resumed = ledger.resume(PolicyVersion(1, 2))
    ledger.close()
    report = audit(tmp_path)
    assert report.agrees, report.text()
    assert (report.trained, report.buffered, report.checkpoint) == (4, 4, 2)
    assert resumed.again == {3: [3], 4: [4]} and [h.issue.number for h in resumed.held] == [3, 4]


def test_retention_lets_old_tokens_go_and_the_audit_still_holds(tmp_path):
    ledger = Ledger(tmp_path, threaded=False, segment_bytes=1000, keep_steps=2)
    ledger.resume(PolicyVersion())
    for n in range(1, 31):
        ledger.issue([issue(n)])
        for s in range(2):
            ledger.finish(n, trajectory(s))
        ledger.train(PolicyVersion(0, n), [(n, s, 0, 10) for s in range(2)])
        if n % 5 == 0:
            asyncio.run(ledger.flush(durable=True))
            ledger.checkpoint(PolicyVersion(0, n))
            asyncio.run(ledger.flush())
    left = len(list((tmp_path / "segments").iterdir()))
    ledger.close()
    report = audit(tmp_path)
    assert report.agrees and report.trained == 60 and left < 5
    assert "retention" in report.text()


def test_the_writer_thread_keeps_up_and_its_failure_reaches_the_loop(tmp_path):
    async def main():
        ledger = Ledger(tmp_path)
        ledger.resume(PolicyVersion())
        ledger.issue([issue(n) for n in range(1, 500)])
        await ledger.flush()
        assert audit(tmp_path).issued == 998
        ledger.drop(1, [0], "stale")
        ledger.drop(1, [0], "stale")  # twice: the index refuses it
        with pytest.raises(DataError, match="cannot be written"):
            await ledger.flush()
        with pytest.raises(DataError, match="cannot be written"):
            ledger.close()

    asyncio.run(main())


def test_diff_names_the_first_step_and_quantity_in_which_two_runs_part(tmp_path, capsys):
    def write(name, nudge=0.0, loss=0.5):
        ledger = Ledger(tmp_path / name / "ledger", threaded=False)
        ledger.resume(PolicyVersion())
        rows = []
        for n in (1, 2, 3):
            ledger.issue([issue(n)])
            for s in range(2):
                t = trajectory(s)
                t.logprobs[5] += nudge if (n, s) == (2, 1) else 0.0
                ledger.finish(n, t)
            ledger.train(PolicyVersion(0, n), [(n, s, 0, 10) for s in range(2)])
            rows.append('{"step": %d, "loss": %r}' % (n, loss if n == 3 else 0.5))
        ledger.close()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows))
        return str(tmp_path / name)

    base = write("base")
    assert milkweed(["diff", base, write("same")]) == 0
    assert milkweed(["diff", base, write("nudged", nudge=0.125)]) == 1
    assert "step 2: logprobs of sample g2/1: entry 5 is -0.625 and -0.5" in capsys.readouterr().out
    assert milkweed(["diff", base, write("loss", loss=0.75)]) == 1
    assert "step 3: loss: 0.5 and 0.75" in capsys.readouterr().out


KILLS = 70


@pytest.mark.parametrize(("staleness", "power_cut"), [(0, True), (2, True), (0, False)])
def test_a_run_killed_again_and_again_loses_and_doubles_nothing(tmp_path, staleness, power_cut):
    dice = random.Random(staleness)
    limits = Limits(groups=3, samples=2, staleness=staleness, steps=200)
    saved, folder, told = PolicyVersion(), tmp_path / "0", {}
    for life in range(KILLS + 1):
        durable = {}

        async def live():
            nonlocal saved
            ledger = Ledger(folder, threaded=False, segment_bytes=6000)
            version = PolicyVersion(life, saved.step)
            resumed = ledger.resume(version, staleness=staleness)
            stream = PromptStream([_prompt(i) for i in range(50)])
            stream.seek(resumed.streams.get("train", 0))
            world = World(
                limits,
                ledger,
                seed=dice.random(),
                fails=0.1 * power_cut,
                version=version,
                stream=stream,
                lineage=Lineage(resumed.lives, resumed.steps),
                numbers=iter(range(resumed.next_number, 10**9)),
            )
            world.generator.restore(resumed.held, stream.at, resumed.again)
            await ledger.flush(durable=True)
            durable.update(sizes(folder))
            try:
                async with asyncio.timeout(dice.expovariate(1 / 8) if life < KILLS else 10**6):
                    while world.version.step < limits.steps:
                        await world.step()
                        await ledger.flush(durable=dice.random() < 0.3)
                        if dice.random() < 0.3 or world.version.step == limits.steps:
                            await ledger.flush(durable=True)
                            durable.update(sizes(folder))
                            saved = world.version
                            if dice.random() < 0.8 or life == KILLS:
                                ledger.checkpoint(world.version)
            except TimeoutError:
                pass
            for now, groups in world.batches:
                told.setdefault(now.step + 1, []).append((now.incarnation, tuple(t.id for g in groups for t in g.scored)))
            if life == KILLS:
                await world.generator.close()
                ledger.close()
                return
            kill(folder, tmp_path / str(life + 1), dice, durable if power_cut else sizes(folder))
            await world.generator.close()
            ledger.close()

        run_virtual(live())
        if life < KILLS:
            shutil.rmtree(folder)
            folder = tmp_path / str(life + 1)
            report = audit(folder, tokens=False)
            assert report.agrees, report.text()
    report = audit(folder)
    assert report.agrees, report.text()
    assert report.checkpoint == 200 and report.max_lag <= staleness and report.held == 0
    assert report.trained + sum(report.dropped.values()) == report.issued
    final = [t for step in sorted(told) for t in told[step][-1][1]]
    assert len(final) == len(set(final)), "none is trained twice"
    if not power_cut:
        assert report.dropped == {} and final == [f"train:{n // 2}/{n % 2}" for n in range(200 * 6)], "as if it had been left alone"


def _prompt(i):
    from flow_support import prompts

    return prompts(50)[i]
