"""Simulated strikes: the real loop, router, supervisor and ledger on virtual time, under engines that fail as told."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from strike_model import KINDS, WINDOWS, Life, Scene, simulate_strikes, throughput  # noqa: E402


def test_200_strikes_lose_double_and_hang_nothing_and_hit_every_window(tmp_path):
    tally = simulate_strikes(200, 7, tmp_path)
    assert tally.strikes == 200 and not tally.problems, tally.problems[:5]
    assert (tally.lost, tally.doubled, tally.over_bound, tally.hangs, tally.orphans) == (0, 0, 0, 0, 0)
    assert set(tally.hit) == {*KINDS, *WINDOWS} and min(tally.hit.values()) >= 15
    assert tally.steps > 400 and len(tally.recover_s) > 30
    assert max(tally.recover_s) < 120, "a replacement that fails again is started again, no more"


def test_strikes_are_not_survived_where_nothing_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(Life, "_bring", lambda self, index: _never())
    tally = simulate_strikes(100, 7, tmp_path)
    assert tally.problems or tally.hangs


async def _never() -> None:
    from milkweed.errors import PeerDied

    raise PeerDied("rollout0", "died", "always")


@pytest.mark.slow
def test_a_run_whose_engines_die_every_ten_minutes_is_nearly_as_fast_as_one_left_alone(tmp_path):
    scene = Scene(engines=16, groups=32, samples=4, length=400, slots=8, train_s=5.0, checkpoint_every=10)
    alone, _ = throughput(scene, 40, 0.0, 1, tmp_path / "alone")
    struck, faults = throughput(msgspec.structs.replace(scene, standby=1), 40, 600.0, 1, tmp_path / "struck")
    assert faults["failed"] >= 30 and alone / struck >= 0.95, f"{alone / struck:.3f} after {faults}"
