"""Simulated strikes: the real loop, router, supervisor and ledger on virtual time, under engines that fail as told."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import strike_real as strike_real_module  # noqa: E402
from strike_model import KINDS, WINDOWS, Life, Scene, Tally, simulate_strikes, throughput  # noqa: E402
from strike_real import Struck, strike_real  # noqa: E402

from milkweed.fleet import processes  # noqa: E402


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


def test_a_strike_that_is_interrupted_leaves_nothing_of_its_run(tmp_path, monkeypatch):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    run = Struck(tmp_path / "run", [sys.executable, "-c", child], lambda text: None, tmp_path / "run.log")
    seen: list[int] = []

    def interrupted(steps: int = 2, within_s: float = 0.0) -> bool:
        group = os.getpgid(run.controller.pid)
        while len(seen) < 2:
            seen[:] = [int(p) for p in os.listdir("/proc") if p.isdigit() and _group(int(p)) == group]
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        strike_real(3, 0, run, Tally())
    assert len(seen) == 2 and run.controller.returncode == -signal.SIGKILL
    time.sleep(0.1)
    assert not [p for p in seen if _group(p) is not None and processes.read(p).state not in "ZX"]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_strikes_go_on_where_they_were_left_and_begin_none_when_the_time_is_over(tmp_path, monkeypatch):
    struck, said = [], []
    run = Struck(tmp_path / "run", [sys.executable, "-c", "import time; time.sleep(60)"], said.append, tmp_path / "run.log")
    monkeypatch.setattr(run, "progress", lambda *a: True)
    monkeypatch.setattr(strike_real_module, "audit", lambda folder: SimpleNamespace(problems=[]))
    monkeypatch.setattr(strike_real_module, "_strike", lambda run, number, kind, dice, tally: struck.append((number, kind)) or True)
    strike_real(6, 3, run, Tally())
    whole, struck[:] = list(struck), []
    strike_real(6, 3, run, Tally(), first=4)
    assert struck == whole[3:] and [n for n, _ in whole] == [1, 2, 3, 4, 5, 6]
    struck.clear()
    assert strike_real(6, 3, run, Tally(), until=0.0).strikes == 0 and not struck and "--first 1" in said[-1]
