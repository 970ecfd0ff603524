"""The loop at every staleness: order, bound, refill, failures, and what it says when nothing passes."""

import pytest
from flow_support import World, run_virtual

from milkweed.data.ledger import Ledger, audit
from milkweed.errors import DataError, FleetError
from milkweed.runs.generator import Limits
from milkweed.types import PolicyVersion


def drive(folder, steps=30, checkpoint_every=5, make=World, **options):
    limits = Limits(**{"groups": 4, "samples": 3, "staleness": 1, **options.pop("limits", {})})

    async def main():
        ledger = Ledger(folder, threaded=False)
        ledger.resume(PolicyVersion(), staleness=limits.staleness)
        world = make(limits, ledger, **options)
        try:
            for step in range(1, steps + 1):
                await world.step()
                if step % checkpoint_every == 0:
                    await ledger.flush(durable=True)
                    ledger.checkpoint(world.version)
        finally:
            await world.generator.close()
            ledger.close()
        return world

    return run_virtual(main())


def lags(world):
    for now, groups in world.batches:
        for g in groups:
            for t in g.scored:
                for span in t.versions:
                    if any(t.loss_mask[span.start : span.end]):
                        yield now.step - span.version.step


@pytest.mark.parametrize("late", ["mask", "wait"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_trained_token_is_over_the_bound_and_the_sums_agree(tmp_path, staleness, late):
    world = drive(tmp_path, limits={"staleness": staleness, "late": late}, fails=0.1)
    seen = list(lags(world))
    assert max(seen) == staleness and min(seen) >= 0
    report = audit(tmp_path)
    assert report.agrees, report.text()
    assert report.max_lag == staleness and report.trained >= 30 * 4 * 2


def test_at_staleness_0_a_batch_is_the_next_prompts_in_order_under_one_version(tmp_path):
    world = drive(tmp_path, limits={"staleness": 0})
    names = [[g.id for g in groups] for _, groups in world.batches]
    assert names == [[f"train:{4 * step + i}" for i in range(4)] for step in range(30)]
    assert world.generator.outstanding == 0, "nothing is begun before it is asked for"
    assert all({s.version for g in groups for t in g.scored for s in t.versions} == {now} for now, groups in world.batches)


def test_groups_are_handed_out_oldest_first_and_a_straggler_does_not_hold_the_batch(tmp_path):
    world = drive(tmp_path, steps=40, limits={"staleness": 2})
    order = [int(g.id.split(":")[1]) for _, groups in world.batches for g in groups]
    assert len(set(order)) == len(order)
    assert order != sorted(order), "stragglers are overtaken"
    assert max(abs(n - i) for i, n in enumerate(order)) <= 3 * 4 * 4, "and none is left behind"


def test_what_waits_is_bounded(tmp_path):
    seen = []

    class Watched(World):
        async def make(self, *a):
            seen.append(self.generator.outstanding)
            return await super().make(*a)

    drive(tmp_path, limits={"staleness": 2}, make=Watched)
    assert max(seen) == 4 * 3


def test_a_rejected_group_is_replaced_at_once_and_counted(tmp_path):
    world = drive(tmp_path, keep=lambda g: len(set(g.rewards)) > 1, limits={"late": "wait"})
    assert all(len(groups) == 4 and all(len(set(g.rewards)) > 1 for g in groups) for _, groups in world.batches)
    report = audit(tmp_path)
    assert report.agrees and report.dropped["rejected by the filter"] > 0


def test_a_filter_that_rejects_everything_is_said_and_then_ends_the_run(tmp_path):
    worlds = []

    class Seen(World):
        def __init__(self, *a, **options):
            super().__init__(*a, **options)
            worlds.append(self)

    with pytest.raises(DataError, match="in a row were turned away.*rejected by the filter"):
        drive(tmp_path, make=Seen, keep=lambda g: False, limits={"patience": 5})
    assert worlds[0].said == ["the last 8 groups were all turned away, the last: rejected by the filter"]
    report = audit(tmp_path)
    assert report.agrees and report.dropped["rejected by the filter"] == 5 * 4 * 3


def test_failures_are_tried_again_within_the_budget_and_never_trained_as_zero(tmp_path):
    world = drive(tmp_path, fails=0.3, limits={"retries": 2})
    report = audit(tmp_path)
    assert report.agrees and report.retried > 0
    assert all(t.reward is not None for _, groups in world.batches for g in groups for t in g.scored)
    assert 0 < report.dropped["environment raised ValueError"] < 0.1 * report.issued


def test_over_sampling_gives_the_tail_up_and_writes_it_down(tmp_path):
    world = drive(tmp_path, limits={"staleness": 0, "oversample": 0.5})
    report = audit(tmp_path)
    assert report.agrees and report.dropped["over-sampled"] > 0
    assert all(len(groups) == 4 for _, groups in world.batches)


def test_a_lost_fleet_reaches_whoever_waits(tmp_path):
    class Lost(World):
        async def make(self, *a):
            raise FleetError("rollout", "refused", "no engine can sample")

    with pytest.raises(FleetError, match="no engine"):
        drive(tmp_path, make=Lost)
    assert audit(tmp_path).agrees
