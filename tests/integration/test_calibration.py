"""The simulator, calibrated on one real run, predicts the step time of others: more engines, more staleness.

Trainer and engines have a core each, so it needs as many cores as run at once: two. Anything else that runs on the machine meanwhile
is in the numbers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import milkweed as mw

pytestmark = [pytest.mark.stack, pytest.mark.slow]
HERE = Path(__file__).resolve().parent
STEPS = 24


def run(folder: Path, model: Path, engines: int, staleness: int) -> float:
    """Median seconds from one step's row to the next."""
    mesh = folder.parent / f"{folder.name}.toml"
    mesh.write_text(f"[trainer]\nthreads = 1\n[rollout]\nreplicas = {engines}\nthreads = 1\n[rollout.engine]\nmax_running_requests = 256\n")
    options = {"model": model, "run-dir": folder, "mesh": mesh, "staleness": staleness, "steps": STEPS, "eval-every": 1000, "checkpoint-every": 1000}
    options |= {"sampling.max-tokens": 120, "sampling.ignore-eos": "false", "sampling.stop-token-ids": "[5,6,7,8,9]"}
    flags = [x for k, v in options.items() for x in (f"--{k}", str(v))]
    done = subprocess.run([sys.executable, str(HERE / "flow_recipe.py"), *flags], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    at = [r["time"] for r in mw.read_metrics(folder) if "loss" in r]
    return statistics.median(b - a for a, b in zip(at[3:], at[4:-1]))


def predicted(folder: Path, engines: int, staleness: int) -> float:
    tool = HERE.parents[1] / "tools" / "simulate.py"
    command = [sys.executable, str(tool), "--json", "--from", str(folder), "--engines", str(engines), "--staleness", str(staleness), "--beside", "measure"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])["step_s"]


def test_one_run_predicts_the_step_time_of_another_with_other_engines_or_other_staleness(tmp_path):
    model = mw.new_qwen3(tmp_path / "model", hidden=256, layers=3, heads=8, kv_heads=4, head_dim=32, intermediate=768)
    base = run(tmp_path / "base", model, 1, 0)
    found = []
    for engines, staleness in ((2, 0), (1, 1)):
        real, guess = run(tmp_path / f"{engines}x{staleness}", model, engines, staleness), predicted(tmp_path / "base", engines, staleness)
        found.append(guess / real - 1)
        print(f"{engines} engines, staleness {staleness}: {real:.3f} s a step, predicted {guess:.3f} s (calibrated on {base:.3f} s)")
    assert max(map(abs, found)) < 0.15
