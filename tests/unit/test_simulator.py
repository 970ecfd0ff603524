"""The simulator: the numbers that the loop is held to, on virtual time, the same for the same seed."""

import json
import subprocess
import sys
from pathlib import Path

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
