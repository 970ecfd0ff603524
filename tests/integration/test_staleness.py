"""The main job one step off: it reaches its reward in about as many steps as when it takes turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
EVERY, STEPS = 2, 40


def steps_to(reward: float, staleness: int, recipes: Path, warm: Path, folder: Path) -> int:
    """The step of the first evaluation that is at `reward`."""
    options = {"model": warm, "staleness": staleness, "run-dir": folder, "steps": 150, "eval-every": EVERY}
    flags = [x for k, v in options.items() for x in (f"--{k}", str(v))]
    command = [sys.executable, "-u", str(recipes / "grpo.py"), *flags]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        for line in run.stdout:
            found = re.search(r"step (\d+): held-out reward ([\d.]+)", line)
            if found and float(found[2]) >= reward:
                return int(found[1])
            if found and int(found[1]) >= STEPS:
                break
    finally:
        run.kill()
        run.wait(30)
    raise AssertionError(f"no held-out reward of {reward} by step {STEPS} at staleness {staleness}")


def test_one_step_off_reaches_the_reward_in_at_most_a_fifth_more_steps(recipes, warm, tmp_path):
    turns = steps_to(0.8, 0, recipes, warm, tmp_path / "turns")
    ahead = steps_to(0.8, 1, recipes, warm, tmp_path / "ahead")
    print(f"0.8 held out: {turns} steps at staleness 0, {ahead} at 1")
    assert ahead <= 1.2 * turns + EVERY  # no evaluation lies between
