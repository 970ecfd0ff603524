"""Recipes as people run them: a script that is interrupted, killed and resumed; a notebook in a real kernel."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import milkweed as mw

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]
FEW = ["--steps", "6", "--prompts", "2", "--samples", "2", "--eval-prompts", "4", "--checkpoint-every", "2", "--trainer.decay", "none"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return mw.new_qwen3(folder, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)


def start(command: list[str], folder: Path, **env: str) -> subprocess.Popen:
    log = (folder / "out.txt").open("a")
    return subprocess.Popen([sys.executable, *command], cwd=folder, stdout=log, stderr=log, env={**os.environ, **env})


def wait_for(folder: Path, text: str, process: subprocess.Popen, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while text not in (said := (folder / "out.txt").read_text()):
        assert process.poll() is None, f"it ended with {process.returncode}:\n{said[-3000:]}"
        assert time.monotonic() < end, f"{text!r} was not said in {seconds} s:\n{said[-3000:]}"
        time.sleep(0.1)


def family(marker: str) -> list[psutil.Process]:
    """Every process that carries `marker` in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARKER") == marker:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def none_left(marker: str, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while (left := family(marker)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, [p.cmdline() for p in left]


def test_a_script_that_is_interrupted_and_killed_leaves_nothing_and_resumes(model, tmp_path):
    recipe = str(ROOT / "recipes" / "grpo.py")
    command = [recipe, "--model", str(model), "--run-dir", "run", *FEW, "--steps", "2000"]
    process = start(command, tmp_path, MARKER="interrupted")
    wait_for(tmp_path, "step 3/", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    none_left("interrupted")
    assert "milkweed run" in (tmp_path / "out.txt").read_text()

    process = start([recipe, "--model", str(model), "--run-dir", "run", *FEW, "--steps", "2000"], tmp_path, MARKER="killed")
    wait_for(tmp_path, "resumed from checkpoint", process)
    wait_for(tmp_path, "giving the engines", process)
    assert len(family("killed")) > 4
    time.sleep(2)
    process.kill()
    process.wait(10)
    none_left("killed")
    held = [row["memory/controller_mb"] for row in mw.read_metrics(tmp_path / "run") if "memory/controller_mb" in row]
    assert held and max(held) < 800, "the controller is to stay small"

    done = subprocess.run(
        [sys.executable, "-m", "milkweed.cli", "run", "run", "--steps", str(mw.read_metrics(tmp_path / "run")[-1]["step"] + 1)],
        cwd=tmp_path, env={**os.environ, "MARKER": "resumed"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from checkpoint" in done.stdout and "held-out reward" in done.stdout.splitlines()[-1]
    none_left("resumed")
    steps = [r["step"] for r in mw.read_metrics(tmp_path / "run") if "time/step" in r]
    assert steps == list(range(1, len(steps) + 1)), "no step is missing and none is there twice"


def test_the_readme_library_example_runs(tmp_path):
    found = re.search(r"<!-- test: library -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(found.group(1))
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "0.1" in done.stdout.split()[-1], done.stdout + done.stderr[-3000:]


def test_the_notebook_runs_from_top_to_bottom(model, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    for name in ("grpo.ipynb", "sft.py"):
        shutil.copy(ROOT / "recipes" / name, tmp_path)
    shutil.copytree(model, tmp_path / "models" / "sums-0")  # the warm-up has its own test
    book = nbformat.read(tmp_path / "grpo.ipynb", as_version=4)
    NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(o.get("text", "") for c in book.cells for o in c.get("outputs", []))
    assert "after 5 steps" in said
    assert any("image/png" in o.get("data", {}) for c in book.cells for o in c.get("outputs", []))
