"""What a recorded run says of its engines and its trainer, for tools/simulate.py."""

from __future__ import annotations

import multiprocessing
import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from milkweed.observe.metrics import read_metrics


def read(folder: Path, update_s: float) -> dict[str, Any]:
    """From a run at staleness 0: `lengths` of its samples, and seconds: `token_s` of a decode step whatever runs, `running_s`
    more for each sample in it, `reward_s` around each sample (its prompt, its messages, its reward), `train_s`, `update_s`,
    and `rest_s` that the loop took besides.

    All samples of a step are begun at once, so a sample of n tokens is done after n decode steps in each of which as many
    run as are at least that long: the seconds that the ledger has of every sample give the three by least squares. Raises
    SystemExit where the run is too short, or was not at staleness 0.
    """
    index = sqlite3.connect(f"{(folder / 'ledger' / 'index.sqlite').absolute().as_uri()}?mode=ro", uri=True)
    try:
        if index.execute("SELECT max(staleness) FROM lives").fetchone()[0]:
            raise SystemExit(f"{folder}: speeds are taken from a run at staleness 0")
        steps: dict[int, list[tuple[int, float]]] = {}
        query = "SELECT t.step, t.tokens, f.seconds FROM trained t JOIN finished f ON f.number=t.number AND f.sample=t.sample WHERE t.lost=0"
        for step, tokens, seconds in index.execute(query):
            steps.setdefault(step, []).append((tokens, seconds))
        groups = statistics.median(n for (n,) in index.execute("SELECT count(DISTINCT number) FROM trained WHERE lost=0 GROUP BY step"))
        (samples,) = index.execute("SELECT max(samples) FROM issued").fetchone()
    finally:
        index.close()
    rows = [r for r in read_metrics(folder) if "time/train" in r and "time/generate" in r and r["step"] in steps][1:]
    if len(rows) < 3:
        raise SystemExit(f"{folder}: at least 4 finished steps are needed to take speeds from")
    engines = _engines(folder)
    token_s, running_s, around_s = _speeds([steps[r["step"]] for r in rows], engines)
    rest = [r["time/step"] - r["time/generate"] - r["time/train"] - r.get("time/update", 0.0) for r in rows]
    return {
        "lengths": [n for r in rows for n, _ in steps[r["step"]]],
        "groups": int(groups),
        "samples": int(samples),
        "token_s": token_s,
        "running_s": running_s,
        "reward_s": around_s,
        "train_s": statistics.median(r["time/train"] for r in rows),
        "update_s": statistics.median(r.get("time/update", update_s) for r in rows),
        "rest_s": statistics.median(max(0.0, x) for x in rest),
    }


def _engines(folder: Path) -> int:
    """Of the run's mesh; they shared its samples evenly."""
    return len(list((folder / "logs").glob("rollout*.log"))) or 1


def _speeds(steps: list[list[tuple[int, float]]], engines: int) -> tuple[float, float, float]:
    rows, took = [], []
    for step in steps:
        lengths = np.sort([n for n, _ in step])
        running = np.array([(lengths >= j).sum() / engines for j in range(1, int(lengths[-1]) + 1)])
        together = np.concatenate([[0.0], np.cumsum(running)])
        for n, seconds in step:
            rows.append((n, together[n], 1.0))
            took.append(seconds)
    fit = np.array(rows)
    for use in ([0, 1, 2], [0, 2], [1, 2], [1]):  # what comes out negative could not be told from the rest
        found = np.zeros(3)
        found[use] = np.linalg.lstsq(fit[:, use], np.array(took), rcond=None)[0]
        if (found >= 0).all():
            return float(found[0]), float(found[1]), float(found[2])
    raise SystemExit("the run's samples took no time that grows with their length")


def beside() -> float:
    """How many times longer a process takes on this machine while another one works beside it (cores share caches, memory
    and power): that of small products, such as a trainer's or an engine's."""
    context = multiprocessing.get_context("spawn")

    def seconds(count: int) -> float:
        barrier, told = context.Barrier(count), context.Queue()
        processes = [context.Process(target=_work, args=(barrier, told)) for _ in range(count)]
        for process in processes:
            process.start()
        found = statistics.mean(told.get(timeout=120) for _ in processes)
        for process in processes:
            process.join(30)
        return found

    alone = min(seconds(1), seconds(1))
    return max(1.0, seconds(2) / alone)


def _work(barrier: Any, told: Any) -> None:
    import torch

    torch.set_num_threads(1)
    x, a, b = torch.randn(64, 256), torch.randn(256, 768), torch.randn(768, 256)
    for seconds in (0.3, 1.5):
        barrier.wait(60)
        end, rounds, began = time.perf_counter() + seconds, 0, time.perf_counter()
        while time.perf_counter() < end:
            torch.nn.functional.silu(x @ a) @ b
            rounds += 1
        took = (time.perf_counter() - began) / rounds
    told.put(took)
