"""Five real kills at random moments; tests/faults/kills.log has what came of two hundred."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import milkweed as mw

pytestmark = pytest.mark.stack


def test_a_run_that_is_killed_five_times_ends_like_one_left_alone(tmp_path):
    model = mw.new_qwen3(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
    script = Path(__file__).with_name("kill_run.py")
    command = [sys.executable, str(script), "--model", str(model), "--folder", str(tmp_path / "runs"), "--kills", "5", "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = (tmp_path / "log").read_text()
    assert log.count("kill ") == 5 and "as of the run left alone" in log and "5 kills: nothing lost" in log
