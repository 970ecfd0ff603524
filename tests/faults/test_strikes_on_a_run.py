"""Five real strikes, the quick ones; tests/faults/strikes.log has what came of those that were done by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
TOOL = Path(__file__).resolve().parents[2] / "tools" / "strike.py"
KINDS = "kill reward,raise reward,kill trainer,crash puller,stop reward"


def test_five_strikes_on_a_live_run_lose_double_and_hang_nothing(tmp_path):
    mesh = tmp_path / "one.toml"
    mesh.write_text('name = "one"\n[rollout.engine]\nmax_running_requests = 64\n')
    command = [sys.executable, str(TOOL), "--kinds", KINDS, "--mesh", str(mesh), "--folder", str(tmp_path / "struck"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["strikes"] == 5 and sum(last["hit"].values()) == 5
    assert [last[k] for k in ("lost", "doubled", "over_bound", "hangs", "orphans", "problems")] == [0] * 6
