"""Where a step's time goes: runs the default job and reports its parts, measured inside the processes that do them.

    ./tools/run tools/bench_loop.py [--steps 20] [--json]

`overhead` is the share of a step that is neither generation, reward, training nor weight update: the loop's own. A step
lasts from the end of the one before to its own, its metrics and samples written. Scoring that runs while engines still
sample is generation's time, not counted twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from milkweed.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps to take (the first two are not counted)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("recipe", nargs=argparse.REMAINDER, help="further arguments for recipes/grpo.py")
    arguments = parser.parse_args()
    if arguments.steps < 5:
        parser.error("--steps must be at least 5")
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as folder:
        warm = subprocess.run([sys.executable, "-c", "import asyncio, sft; print(asyncio.run(sft.warm_model()).absolute())"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
        if warm.returncode:
            raise SystemExit(f"the warm-up failed:\n{warm.stderr[-2000:]}")
        model = warm.stdout.strip().splitlines()[-1]
        command = [sys.executable, str(ROOT / "recipes" / "grpo.py"), "--model", model, "--run-dir", f"{folder}/run", "--steps", str(arguments.steps)]
        command += ["--eval-every", "1000000", "--eval-prompts", "16", "--checkpoint-every", "1000000", *arguments.recipe]
        began = time.time()
        subprocess.run(command, cwd=ROOT, check=True, timeout=120 + 60 * arguments.steps, stdout=sys.stderr)
        rows = [r for r in read_metrics(f"{folder}/run") if "time/step" in r]
    result = summary(rows, began)
    for name, value in result.items():
        print(f"{name:24} {value:.4f}")
    if arguments.json:
        print(json.dumps(result))


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT / 'recipes'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def summary(rows: list[dict], began: float) -> dict[str, float]:
    """Medians over the steps after the second. `rows` are a run's metrics, `began` when the recipe was started (Unix time)."""
    steady = rows[2:]
    parts = ("generate", "reward", "train", "update")
    lasted = [after["time"] - before["time"] for before, after in zip(rows[1:], steady)]
    overheads = [1 - sum(r[f"time/{p}"] for p in parts) / whole for r, whole in zip(steady, lasted, strict=True)]
    return {
        "step_s": statistics.median(lasted),
        **{f"{p}_s": statistics.median(r[f"time/{p}"] for r in steady) for p in parts},
        "overhead": statistics.median(overheads),
        "start_to_first_step_s": rows[0]["time"] - began,
    }


if __name__ == "__main__":
    main()
