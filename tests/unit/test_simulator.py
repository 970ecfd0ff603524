"""The simulator: the numbers that the loop is held to, on virtual time, the same for the same seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "simulate.py"


def simulate(*arguments):
    done = subprocess.run([sys.executable, str(TOOL), "--json", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_with_long_tailed_lengths_staleness_2_comes_near_the_bound_and_loses_nothing():
    result, text = simulate("--steps", "40")
    assert result["async_over_bound"] >= 0.95 and result["async_over_sync"] >= 2.5
    assert result["lost"] == 0 and result["doubled"] == 0 and result["max_lag"] <= 2
    assert "no loop can do a step in less than 16.00 s" in text and "staleness 2 is the least that is worth its lag" in text


def test_a_seed_gives_the_same_run_again():
    one, two, other = (simulate("--steps", "4", "--groups", "8", "--seed", s)[0]["step_s"] for s in ("3", "3", "4"))
    assert one == two != other


@pytest.mark.parametrize("steps", [600, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", ["mask", "wait"])
def test_no_trained_token_is_over_the_bound_whatever_dies_is_late_or_is_turned_away(tmp_path, monkeypatch, steps, late):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from simulate import Plan, simulate

    plan = Plan(
        engines=4, slots=4, groups=2, samples=2, tokens=20, sigma=1.0, max_tokens=0, token_s=0.02, running_s=0.0, train_s=0.2, reward_s=0.01,
        update_s=0.05, staleness=2, late=late, oversample=0.25 * (late == "mask"), steps=steps, seed=1, deaths_s=30.0, restart_s=2.0,
        fails=0.05, rejects=0.2, jitter=0.9,
    )  # fmt: skip
    found = simulate(plan, tmp_path)
    assert found.over_bound == 0 and found.max_lag == 2 and found.lost == 0 and found.doubled == 0
    assert found.deaths > steps / 50 and found.dropped["rejected by the filter"] > steps / 4, "there was something to withstand"
