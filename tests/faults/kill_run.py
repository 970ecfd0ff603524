"""Kills a run and everything of it at random moments, again and again, and resumes it each time.

    python tests/faults/kill_run.py --model MODEL --folder FOLDER --kills 200 --log tests/faults/kills.log

Rounds of the small run in tests/integration/flow_recipe.py. Half of the kills come while a life is starting, half when
it trains. After each: the audit agrees. A round that came to its end is compared, to the bit: a synchronous one (seeded
sampling) with one that nobody killed, an asynchronous one with its own replay. What is in FOLDER goes on where it was left, so that the
kills may be done in pieces (--minutes). Exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from milkweed.data.ledger import audit
from milkweed.observe.metrics import read_metrics
from milkweed.runs.replay import replay

RECIPE = Path(__file__).resolve().parents[1] / "integration" / "flow_recipe.py"
STEPS, EVERY = 24, 2
START_S = 14.0
"""About as long as a start takes."""


class Wrong(Exception):
    """What a kill must not do."""


def start(folder: Path, model: Path, staleness: int, log: Path) -> psutil.Popen:
    options = {"model": model, "run-dir": folder, "staleness": staleness, "steps": STEPS, "checkpoint-every": EVERY, "eval-every": 9}
    flags = [x for k, v in options.items() for x in (f"--{k}", str(v))]
    with log.open("a") as out:
        return psutil.Popen([sys.executable, str(RECIPE), *flags, *(["--deterministic", "true"] if not staleness else [])], stdout=out, stderr=subprocess.STDOUT)


def kill(run: psutil.Popen) -> int:
    """SIGKILL to all processes of the run; how many there were."""
    processes = []
    try:
        processes = run.children(recursive=True)
    except psutil.NoSuchProcess:
        pass
    for process in [run, *processes]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    run.wait(30)
    psutil.wait_procs(processes, timeout=30)
    return 1 + len(processes)


def parameters(folder: Path) -> str:
    """Digest of all that the run's last checkpoint holds: parameters and moments."""
    import torch
    import torch.distributed.checkpoint as dcp

    place = folder / "checkpoints" / f"step-{STEPS}"
    metadata = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    state = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=str(place), no_dist=True)
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def step(folder: Path) -> int:
    return max((r["step"] for r in read_metrics(folder) if "loss" in r), default=0)


def finish(folder: Path, model: Path, staleness: int, log: Path) -> None:
    run = start(folder, model, staleness, log)
    try:
        if run.wait(400) != 0:
            raise Wrong(f"the run ended with {run.returncode}: {log.read_text()[-2000:]}")
    finally:
        kill(run)


def one_kill(folder: Path, model: Path, staleness: int, dice: random.Random, log: Path) -> str | None:
    """Start, wait for a random moment, kill, audit. What to write down; None where the run came to its end before."""
    begun = step(folder) if folder.exists() else 0
    began, run = time.monotonic(), start(folder, model, staleness, log)
    try:
        starting, wait = dice.random() < 0.5, dice.random()
        if starting:
            moment = began + wait * START_S
        else:
            while step(folder) <= begun and run.poll() is None and time.monotonic() < began + 300:
                time.sleep(0.05)
            moment = time.monotonic() + 3 * wait
        while time.monotonic() < moment and run.poll() is None:
            time.sleep(0.002)
        if run.poll() is not None:
            if run.returncode != 0:
                raise Wrong(f"the run ended with {run.returncode}: {log.read_text()[-2000:]}")
            return None
    finally:
        after, count = time.monotonic() - began, kill(run)
    if not (folder / "ledger" / "index.sqlite").exists():
        return f"{after:5.1f} s, {count} processes, before there was a ledger"
    try:
        report = audit(folder)
    except Exception as error:
        raise Wrong(f"the audit failed: {error}") from error
    if not report.agrees or report.max_lag > staleness:
        raise Wrong(report.text())
    sums = f"issued {report.issued} = trained {report.trained} + dropped {sum(report.dropped.values())} + held {report.held}"
    return f"{after:5.1f} s, {count} processes, life {report.lives}, step {step(folder)}, checkpoint {report.checkpoint}: {sums}"


def check_round(folder: Path, staleness: int, want: str) -> str:
    """What a finished round must be."""
    report = audit(folder)
    if not report.agrees or report.held or report.checkpoint != STEPS or report.max_lag > staleness:
        raise Wrong(report.text())
    if sorted(r["step"] for r in read_metrics(folder) if "loss" in r) != list(range(1, STEPS + 1)):
        raise Wrong("not every step has one row of metrics")
    sums = f"trained {report.trained} + dropped {sum(report.dropped.values())} = issued {report.issued}, {report.lives} lives"
    if staleness == 0:
        if (got := parameters(folder)) != want:
            raise Wrong(f"parameters {got[:12]}, left alone {want[:12]}")
        return f"{sums}; parameters and moments {want[:12]}, as of the run left alone"
    again = asyncio.run(replay(folder))
    if not again.same or not again.parameters:
        raise Wrong(again.text())
    return f"{sums}; {again.text()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs go")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long, to go on another time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    a = parser.parse_args()
    end = time.monotonic() + 60 * a.minutes
    a.folder.mkdir(parents=True, exist_ok=True)
    output = a.folder / "output"

    def say(text: str) -> None:
        print(text, flush=True)
        with a.log.open("a") as log:
            log.write(text + "\n")

    done = sum(line.startswith("kill ") for line in a.log.read_text().splitlines()) if a.log.exists() else 0
    alone = a.folder / "alone"
    if not (alone / "checkpoints" / f"step-{STEPS}" / ".metadata").exists():
        finish(alone, a.model, 0, output)
        say(f"left alone: {STEPS} steps, parameters and moments {parameters(alone)[:12]}")
    want, number = parameters(alone), 0
    try:
        while done < a.kills and time.monotonic() < end:
            folder = a.folder / f"round{number}"
            if not (folder / "checked").exists():
                staleness = 0 if number % 3 < 2 else 1
                while done < a.kills and time.monotonic() < end:
                    told = one_kill(folder, a.model, staleness, random.Random(f"{a.seed}/{done}"), output)
                    if told is None:
                        break
                    done += 1
                    say(f"kill {done} (round {number}, staleness {staleness}): {told}")
                if done < a.kills and time.monotonic() >= end:
                    break
                finish(folder, a.model, staleness, output)
                say(f"round {number} (staleness {staleness}) ended: {check_round(folder, staleness, want)}")
                (folder / "checked").touch()
            number += 1
    except Wrong as wrong:
        say(f"WRONG: {wrong}")
        return 1
    say(f"{done} kills: nothing lost, nothing doubled" if done >= a.kills else f"{done} of {a.kills} kills so far")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of Monarch's may not outlive the interpreter
