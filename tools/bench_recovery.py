#!/usr/bin/env python3
"""How long a live run goes without what failed, and what more and fewer engines do to it.

    ./tools/run tools/bench_recovery.py [--rounds 3] [--json]

A run of a tiny model goes on all the time, sampling one step ahead. In turn: engines are added (1 -> 3) and taken away again
(3 -> 1); the host of an engine is about to be taken away; an engine is killed, with none and with one that stands by; the
trainer is killed. Everything is measured from the outside, by what the router and metrics.jsonl say.

With --json the last line is one object; seconds, medians of `--rounds`: `engine_start_s` (from the call to serving the
current version), `engine_killed_s` (killed to as many serving it as before), `standby_s` (the same, with one that stands by),
`trainer_killed_s` (killed to the next step trained); tokens/s of all engines `tokens_per_s` with 1, 3 and again 1 engines;
`handed_over`, samples of a host that was taken away and done elsewhere; `problems`, what the audit found wrong (0).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST_S = 150.0
WATCHED_S = 12.0
"""Seconds over which tokens are counted."""


def mesh(folder: Path, standby: int, slots: int) -> Path:
    file = folder / f"standby{standby}.toml"
    file.write_text(
        f'name = "recovery"\n[hosts]\ncount = 2\nnotice = "{folder}/notice-{{host}}"\nnotice_s = 1\n'
        f"[rollout]\nreplicas = 1\nstandby = {standby}\n[rollout.engine]\nmax_running_requests = {slots}\n[faults]\nretries = 20\nrole_retries = 40\nhost_retries = 40\n"
    )  # fmt: skip
    return file


async def until(what: str, true: Callable[[], bool], within_s: float = LONGEST_S) -> float:
    """Seconds until it is; SystemExit where it is not in time."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > within_s:
            raise SystemExit(f"{what}: not within {within_s:g} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


class Bench:
    """One live run, and what is done to it."""

    def __init__(self, run: Any, folder: Path, say: Callable[[str], None]) -> None:
        self.run, self.folder, self.say = run, folder, say
        self.router = run.mesh.rollout

    def serving(self) -> list[Any]:
        """Engines that serve the newest version."""
        return [e for e in self.router.crew.living if e.usable and e.stats.version == self.router.version]

    def named(self, role: str) -> list[Any]:
        return [r for r in self.run.mesh.fleet.replicas if r.role == role and r.failure is None]

    async def scale(self, engines: int) -> float:
        began = time.monotonic()
        await self.router.scale(engines)
        await until(f"{engines} engines", lambda: len(self.serving()) == engines)
        took = time.monotonic() - began
        self.say(f"{engines} engines serve after {took:.1f} s")
        return took

    async def speed(self) -> float:
        """Tokens/s of all engines, over whole steps."""
        step = self.run.step
        await until("a step", lambda: self.run.step > step)
        began, tokens, step = time.monotonic(), self.router.tokens, self.run.step
        await asyncio.sleep(WATCHED_S)
        last = self.run.step
        await until("a step", lambda: self.run.step > last)
        speed = (self.router.tokens - tokens) / (time.monotonic() - began)
        self.say(f"{len(self.serving())} engines: {speed:.0f} tokens/s, {self.run.step - step} steps")
        return speed

    async def engine_killed(self) -> float:
        """SIGKILL to every process of an engine that serves."""
        engine, count = self.serving()[0], len(self.serving())
        for pid in [*engine.replica.pids, *engine.stats.pids.values()]:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        await until("its death to be known", lambda: engine.dead is not None)
        await until("as many to serve as before", lambda: len(self.serving()) >= count)
        took = time.monotonic() - began
        self.say(f"{engine.replica.name} killed: {count} serve again after {took:.1f} s")
        everybody = 1 + self.run.mesh.config.rollout.standby
        await until("all to be there again", lambda: len([e for e in self.router.crew.living if e.stale is None and not e.leaving]) >= everybody)
        await asyncio.sleep(2.0)
        return took

    async def trainer_killed(self) -> float:
        step = self.run.step
        await until("a step", lambda: self.run.step > step)
        step = self.run.step
        os.kill(self.named("trainer")[0].pids[0], signal.SIGKILL)
        took = await until("the next step", lambda: self.run.step > step + 1)
        self.say(f"trainer killed: the next step is trained after {took:.1f} s")
        await asyncio.sleep(2.0)
        return took

    async def preempted(self) -> int:
        """The host of the busiest engine is about to be taken away; how many samples others did for it."""
        engine = max(self.serving(), key=lambda e: len(e.pending))
        host, held = engine.replica.host, list(engine.pending.values())
        (self.folder / f"notice-{host.index}").touch()
        await until("it to be gone", lambda: engine.dead is not None or engine not in self.router.crew.engines)
        await until("another to serve", lambda: any(e.replica.host is not host for e in self.serving()))
        await until("its samples", lambda: all(p.future.done() for p in held))
        (self.folder / f"notice-{host.index}").unlink()
        lost = sum(p.future.exception() is not None for p in held if not p.future.cancelled())
        if lost:
            raise SystemExit(f"{lost} of {len(held)} samples of the host that was taken away failed")
        elsewhere = sum(bool(p.engine is not None and p.engine is not engine) for p in held)
        self.say(f"{host.name} taken away: of {len(held)} samples {elsewhere} were done elsewhere, none failed")
        return elsewhere


async def live(folder: Path, model: Path, standby: int, slots: int, say: Callable[[str], None], work: Callable[[Bench], Any]) -> int:
    """`work` on a run that goes on; how many problems its audit has."""
    import milkweed as mw
    from milkweed.data.ledger import audit

    at = folder / f"run{standby}"
    cfg = mw.RunConfig(
        run_dir=str(at), mesh=str(mesh(folder, standby, slots)), steps=1_000_000, staleness=1, checkpoint_every=5, samples_logged=0,
        sampling=mw.Sampling(max_tokens=200, ignore_eos=True), trainer=mw.TrainerConfig(lr=1e-4, seq_len=512, micro_rows=16),
    )  # fmt: skip
    data = mw.split(mw.arithmetic(digits=2, low=10, question="{a}+{b}="), held_out=0.2)

    async def train(run: Any) -> None:
        prompts, loss = run.stream(data.train), mw.algorithms.grpo_loss()
        solve = mw.single_turn(lambda prompt, completion: float(sum(map(ord, completion)) % 2))
        async for _ in run.steps():
            groups = await run.sample(solve, prompts, 8, n=4)
            await run.train(mw.batch(groups, mw.algorithms.grpo), loss)
            await run.publish()

    async with mw.start(cfg, model=str(model)) as run:
        training, bench = asyncio.ensure_future(train(run)), Bench(run, folder, say)
        done = asyncio.ensure_future(work(bench))
        try:
            await until("the first steps", lambda: run.step > 3 or training.done())
            await asyncio.wait([training, done], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                training.result()
            await done
        finally:
            for task in (training, done):
                task.cancel()
            await asyncio.wait([training, done])
    report = audit(at)
    for problem in report.problems:
        say(f"audit: {problem}")
    return len(report.problems) + (not report.agrees) + (report.max_lag > 1)


async def measure(folder: Path, model: Path, rounds: int, slots: int, say: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {"engine_start_s": [], "engine_killed_s": [], "standby_s": [], "trainer_killed_s": [], "tokens_per_s": {}, "handed_over": 0}

    async def alone(b: Bench) -> None:
        await until("the first steps", lambda: b.run.step > 3)
        found["tokens_per_s"]["1"] = await b.speed()
        found["engine_start_s"].append(await b.scale(2))
        await b.scale(3)
        found["tokens_per_s"]["3"] = await b.speed()
        await b.scale(1)
        found["tokens_per_s"]["1 again"] = await b.speed()
        for _ in range(rounds - 1):
            found["engine_start_s"].append(await b.scale(2))
            await b.scale(1)
        for _ in range(rounds):
            found["engine_killed_s"].append(await b.engine_killed())
        for _ in range(rounds):
            found["trainer_killed_s"].append(await b.trainer_killed())
        found["handed_over"] = await b.preempted()

    async def with_standby(b: Bench) -> None:
        await until("the first steps", lambda: b.run.step > 3)
        for _ in range(rounds):
            found["standby_s"].append(await b.engine_killed())

    problems = await live(folder, model, 0, slots, say, alone)
    problems += await live(folder, model, 1, slots, say, with_standby)
    medians = {k: round(statistics.median(v), 2) for k, v in found.items() if isinstance(v, list)}
    return medians | {"tokens_per_s": {k: round(v) for k, v in found["tokens_per_s"].items()}, "handed_over": found["handed_over"], "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4, help="samples that an engine runs at once")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if a.rounds < 1 or a.slots < 1:
        parser.error("--rounds and --slots must be at least 1")
    import milkweed as mw

    with tempfile.TemporaryDirectory() as folder:
        model = mw.new_qwen3(Path(folder) / "model", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
        result = asyncio.run(measure(Path(folder), model, a.rounds, a.slots, lambda line: print(line, flush=True)))
    print(json.dumps(result) if a.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
