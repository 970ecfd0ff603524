"""A run whose controller is killed goes on with the engines it had."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import milkweed as mw
from milkweed.data.ledger import audit
from milkweed.fleet import processes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from strike_real import Struck, command  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def engines(run: Struck) -> dict[int, str]:
    """The processes of engines, and the replica that each is."""
    run.of_role("")
    found = {pid: processes.environment(pid).get(processes.REPLICA_VAR, "") for token in run.tokens for pid in processes.by_token(token)}
    return {pid: name for pid, name in found.items() if name.startswith("rollout")}


def test_a_run_whose_controller_is_killed_goes_on_with_its_engines_within_20_seconds(tmp_path):
    model = mw.new_qwen3(tmp_path / "model", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
    mesh = tmp_path / "graced.toml"
    mesh.write_text('name = "graced"\n[hosts]\norphan_grace_s = 60\n[rollout]\nreplicas = 2\n[rollout.engine]\nmax_running_requests = 64\n')
    run = Struck(tmp_path / "run", command(tmp_path / "run", model, str(mesh)), print, tmp_path / "run.log")
    log = tmp_path / "run.log"
    try:
        run.start()
        assert run.progress(6), log.read_text()[-3000:]
        before = engines(run)
        assert len(set(before.values())) == 2 and len(run.tokens) == 1
        run.controller.kill()
        run.controller.wait(10)
        began = time.monotonic()
        run.start()
        assert run.progress(1), log.read_text()[-3000:]
        took = time.monotonic() - began
        print(f"killed to next step: {took:.1f} s")
        assert engines(run) == before, "the same processes"
        assert run.progress(2) and len(run.tokens) == 1
        assert "was adopted, with rollout0g" in log.read_text()
        assert took <= 20, f"{took:.1f} s"
        # a mesh without grace has no use for them
        run.controller.kill()
        run.controller.wait(10)
        run.command += ["--mesh", str(mesh.with_name("plain.toml"))]
        mesh.with_name("plain.toml").write_text(mesh.read_text().replace("orphan_grace_s = 60", "orphan_grace_s = 0"))
        old = set(run.tokens)
        run.start()
        assert run.progress(1), log.read_text()[-3000:]
        assert "former life were still there, and were ended" in log.read_text()
        assert not [pid for token in old for pid in processes.by_token(token)]
        assert run.interrupt(60)
    finally:
        run.end()
    time.sleep(1.0)
    assert not run.orphans()
    report = audit(tmp_path / "run")
    assert report.agrees and not report.problems
