"""Asynchronous runs on the real stack: sampling ahead within the bound, kill -9 at any moment, and the sums still agree."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import milkweed as mw
from milkweed.data.ledger import audit
from milkweed.runs.replay import replay

pytestmark = pytest.mark.stack
RECIPE = Path(__file__).with_name("flow_recipe.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return mw.new_qwen3(tmp_path_factory.mktemp("model"), hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)


def start(folder: Path, model: Path, log) -> subprocess.Popen:
    command = [sys.executable, str(RECIPE), "--model", str(model), "--run-dir", str(folder), "--staleness", "1"]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def rows(folder: Path) -> dict[int, dict]:
    return {r["step"]: r for r in mw.read_metrics(folder) if "loss" in r}


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0 for none. It is written while the run goes on."""
    return max((int(p.parent.name.split("-")[1]) for p in folder.glob("checkpoints/step-*/.metadata")), default=0)


def test_a_run_one_step_off_is_killed_and_goes_on_with_nothing_lost_or_doubled(model, tmp_path):
    folder = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        first = start(folder, model, log)
        try:
            deadline = time.monotonic() + 240
            while newest(folder) < 3 or max(rows(folder)) <= newest(folder):
                assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.02)
        finally:
            os.kill(first.pid, signal.SIGKILL)
            first.wait(30)
        killed, before, checkpoint = audit(folder), rows(folder), newest(folder)
        assert killed.agrees, killed.text()
        assert killed.checkpoint <= checkpoint and killed.unsaved > 0 and killed.held >= killed.unsaved
        time.sleep(6)  # hosts of a dead controller are gone after 5 s
        assert start(folder, model, log).wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
    after, report = rows(folder), audit(folder)
    assert report.agrees, report.text()
    assert (report.checkpoint, report.lives, report.held) == (9, 2, 0)
    assert report.max_lag == 1, "it was ahead, and by no more than the bound"
    assert report.trained + sum(report.dropped.values()) == report.issued and report.trained >= 9 * 8 * 4 * 0.9
    assert sorted(after) == list(range(1, 10)) and {r["version"].split(".")[0] for r in after.values()} == {"0", "1"}
    lost = [step for step in before if step > checkpoint]
    assert lost and all(after[s][k] == before[s][k] for s in lost for k in ("loss", "grad_norm")), "what was lost was trained again from the same samples"
    again = asyncio.run(replay(folder))
    assert again.same and again.parameters and (again.first, again.last) == (1, 9), again.text()
    held_out = [r["step"] for r in mw.read_metrics(folder) if "held_out/reward" in r]
    assert {0, 4, 8} <= set(held_out), "evaluations go on beside training, each under its own step"
