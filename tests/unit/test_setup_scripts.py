"""tools/run, tools/test and what they share: made once, cut off and repeated, brought up to date. Python is a stand-in
that notes what pip was asked for, so nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/bin/bash
# stands in for python3.11 and for .venv/bin/python
here=$(cd "$(dirname "$0")" && pwd)
case "$1 $2" in
    "-c import sys, ensurepip"*) exit 0 ;;
    "-V "*) echo "Python 3.11.0" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        echo "pip ${@:3}" >>"$CALLS"
        [[ -z ${PIP_DIES:-} || "$*" != *"-r "* ]] || kill -9 "$PPID"
        ;;
    *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A checkout with short locks, where python3.11 is the stand-in. Call it with a command; `calls()` is pip's log."""
    root, path = tmp_path / "clone", tmp_path / "bin"
    for folder in (root / "recipes", path):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "recipes/a.py").write_text("")
    (root / "tools/lock/cpu.txt").write_text("# head\nsetuptools==1\ntorch==2+cpu\nmsgspec==3\n")
    (root / "tools/lock/cpu-no-deps.txt").write_text("sglang==4\n")
    (path / "python3.11").write_text(FAKE)
    (path / "python3.11").chmod(0o755)
    log = tmp_path / "calls"

    class Clone:
        folder = root

        def __call__(self, *command: str, **environment: str) -> subprocess.CompletedProcess:
            settings = {
                "PATH": f"{path}:{os.environ['PATH']}",
                "CALLS": str(log),
                "MILKWEED_LANE": "cpu",
                "HOME": str(tmp_path),
            }
            return subprocess.run(
                command, cwd=root, env=settings | environment, capture_output=True, text=True, timeout=60, check=False
            )

        def calls(self) -> list[str]:
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            return lines

    return Clone()


def installs(calls: list[str]) -> int:
    return sum(" -r " in call for call in calls)


def test_the_first_use_installs_and_the_second_starts_at_once(clone):
    first = clone("tools/run", "recipes/a.py", "--steps", "3")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "ran recipes/a.py --steps 3\n"
    assert "making .venv" in first.stderr and "ready after" in first.stderr
    calls = clone.calls()
    assert installs(calls) == 3  # build tools, then two lists at once
    assert all("--no-deps" in call for call in calls)
    assert any("--editable ." in call for call in calls) and any(call.endswith("/sglang-cpu") for call in calls)
    second = clone("tools/run", "recipes/a.py")
    assert (second.stdout, second.stderr, clone.calls()) == ("ran recipes/a.py\n", "", [])


def test_a_set_up_that_was_killed_is_made_again_from_the_start(clone):
    clone("tools/test", "--setup-only", PIP_DIES="1")
    assert (clone.folder / ".venv/being-made").exists()
    (clone.folder / ".venv/half-a-package").touch()
    clone.calls()
    again = clone("tools/test", "--setup-only")
    assert again.returncode == 0 and "cut off" in again.stderr
    assert installs(clone.calls()) == 3
    assert not (clone.folder / ".venv/half-a-package").exists()
    assert not (clone.folder / ".venv/being-made").exists()


def test_another_lock_is_installed_over_the_old_one_and_our_own_changes_alone_reinstall_only_ours(clone):
    clone("tools/test", "--setup-only")
    clone.calls()
    (clone.folder / "tools/lock/cpu.txt").write_text("setuptools==1\ntorch==2+cpu\nmsgspec==4\n")
    assert "up to date" in clone("tools/test", "--setup-only").stderr
    assert installs(clone.calls()) == 3
    (clone.folder / "tools/sglang-cpu/src/sglang_cpu/new.py").write_text("")
    assert clone("tools/test", "--setup-only").returncode == 0
    calls = clone.calls()
    assert installs(calls) == 0 and any(call.endswith("/sglang-cpu") for call in calls)


def test_the_other_lane_gets_an_environment_of_its_own(clone):
    clone("tools/test", "--setup-only")
    clone.calls()
    (clone.folder / "tools/lock/gpu.txt").write_text("setuptools==1\ntorch==3\nsglang==4\n")
    done = clone("tools/test", "--setup-only", MILKWEED_LANE="gpu")
    assert "for the cpu lane; making it again for the gpu lane" in done.stderr
    assert not any(call.endswith("/sglang-cpu") for call in clone.calls())


def test_without_arguments_run_prints_help_and_installs_nothing(clone):
    done = clone("tools/run")
    assert done.returncode == 0 and "recipes/grpo.py" in done.stdout
    assert not (clone.folder / ".venv").exists()


def test_what_is_neither_a_file_nor_a_command_is_named(clone):
    done = clone("tools/run", "recipes/nothing.py")
    assert done.returncode == 2 and "recipes/nothing.py is neither a file" in done.stderr


def test_a_wrong_lane_is_refused(clone):
    done = clone("tools/test", "--setup-only", MILKWEED_LANE="tpu")
    assert done.returncode == 1 and "MILKWEED_LANE is 'tpu'" in done.stderr
