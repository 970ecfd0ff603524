"""How many engines, what staleness? Milkweed's own loop, router and ledger on virtual time, with model engines and a model trainer.

    ./tools/run tools/simulate.py                            # long-tailed lengths, staleness 2 against 0
    ./tools/run tools/simulate.py --engines 1000 --slots 100 --groups 4000 --tokens 1000 --steps 4 --token-s 0.1
    ./tools/run tools/simulate.py --from runs/grpo-... --engines 2 --staleness 1

An engine decodes up to `slots` samples at once; one token of each takes `token_s + running_s * running` seconds. A batch
takes the trainer `train_s` seconds (default: as long as the engines need for it when all their slots are full).
`bound` is what the parts allow: a batch in the longer of these two times. --from takes lengths and speeds from a run's
ledger and metrics. Every seed gives the same run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from simulated import MESH_UPDATE_S, EngineModel, SimulatedMesh

from milkweed.data import PromptStream
from milkweed.data.ledger import audit
from milkweed.rollout.router import Router
from milkweed.runs.config import RunConfig
from milkweed.runs.flow import Flow
from milkweed.runs.virtual_time import run_virtual
from milkweed.types import Group, PolicyVersion, Prompt, Sampling


class Plan(msgspec.Struct, kw_only=True):
    """What is simulated."""

    engines: int
    slots: int
    groups: int
    samples: int
    tokens: float
    sigma: float
    max_tokens: int
    token_s: float
    running_s: float
    train_s: float
    reward_s: float
    update_s: float
    staleness: int
    late: str
    oversample: float
    steps: int
    seed: int
    deaths_s: float = 0.0
    restart_s: float = 30.0
    fails: float = 0.0
    rejects: float = 0.0
    jitter: float = 0.0
    beside: float = 1.0
    lengths: list[int] = []

    @property
    def engines_s(self) -> float:
        """A batch from engines whose slots are all full."""
        mean = statistics.mean(self.lengths) if self.lengths else self.tokens
        per_s = self.engines * self.slots / (self.token_s + self.running_s * self.slots)
        return self.groups * self.samples * mean / per_s

    def length(self, dice: random.Random) -> int:
        if self.lengths:
            return dice.choice(self.lengths)
        drawn = round(dice.lognormvariate(math.log(self.tokens) - self.sigma**2 / 2, self.sigma))
        return min(max(1, drawn), self.max_tokens or drawn + 1)


class Outcome(msgspec.Struct, kw_only=True):
    step_s: float
    """Of the steps after the pipe was full and before the run had nothing more to begin."""
    drain_s: float
    """What the last batches took, for which the slowest samples had to be waited for."""
    trained_per_s: float
    trained_tokens_per_s: float
    generated_tokens: int
    masked: float
    dropped: dict[str, int]
    deaths: int
    lag: float
    engines_busy: float
    in_flight: int
    controller_core: float
    controller_us: float
    lost: int
    doubled: int
    max_lag: int
    over_bound: int
    """Trained tokens over the bound, counted from the batches themselves."""
    virtual_s: float
    real_s: float


def simulate(plan: Plan, folder: Path) -> Outcome:
    """One run; its ledger is left in `folder`."""
    return run_virtual(_run(plan, folder))


async def _run(plan: Plan, folder: Path) -> Outcome:
    import asyncio

    loop = asyncio.get_running_loop()
    dice, chance = random.Random(plan.seed), random.Random(f"{plan.seed}/chance")  # the same lengths whatever befalls the run
    engines = [
        EngineModel(f"rollout{i}", slots=plan.slots, token_s=plan.token_s, running_s=plan.running_s, length=lambda: plan.length(dice), restart_s=plan.restart_s)
        for i in range(plan.engines)
    ]
    outstanding = math.ceil(plan.groups * (1 + plan.oversample)) * plan.samples * (plan.staleness + 1)
    router = Router(engines, [e.stats for e in engines], max_in_flight=max(plan.slots, math.ceil(1.1 * outstanding / plan.engines)))
    router.sample = functools.partial(router.sample, deadline_s=1e9)  # type: ignore[method-assign]  # plans may be slower than any real engine
    mesh = SimulatedMesh(router, engines, train_s=plan.train_s, update_s=plan.update_s, beside=plan.beside)
    config = RunConfig(seed=plan.seed, steps=plan.steps, staleness=plan.staleness, late=plan.late, oversample=plan.oversample, trajectory_deadline_s=1e7)
    flow = Flow(config, folder, mesh, print, threaded=False)  # type: ignore[arg-type]
    mesh.update_deadline_s = 1e7
    flow.resume(PolicyVersion(), same=True)
    prompts = [Prompt(id=f"p{i}", messages=[], token_ids=[1] * 32) for i in range(max(1000, plan.groups))]
    stream = PromptStream(prompts, seed=plan.seed)

    async def kill() -> None:
        while True:
            await asyncio.sleep(chance.expovariate(plan.engines / plan.deaths_s))
            chance.choice(engines).die()

    def keep(group: Group) -> bool:
        return chance.random() >= plan.rejects

    EngineModel.deaths, EngineModel.factor = 0, 1.0
    killer = asyncio.create_task(kill()) if plan.deaths_s else None
    flying = peak = 0

    async def env(prompt: Prompt, policy: Any) -> Any:
        nonlocal flying, peak
        flying += 1
        peak = max(peak, flying)
        try:
            completion = await policy.sample(prompt.token_ids)
        finally:
            flying -= 1
        if plan.reward_s:
            await asyncio.sleep(plan.reward_s)
        if chance.random() < plan.fails:
            raise RuntimeError("chance")
        return completion.trajectory(reward=float(len(completion.token_ids) % 2))

    batches: list[tuple[float, int, int]] = []
    seen: dict[str, int] = {}
    masked = over_bound = 0
    lag_sum = lag_count = 0
    real, cpu = time.perf_counter(), time.process_time()
    EngineModel.cpu_s = 0.0
    for step in range(plan.steps):
        groups: list[Group] = await flow.take(env, stream, "train", groups=plan.groups, samples=plan.samples, sampling=Sampling(), keep=keep if plan.rejects else None)
        began = time.process_time()
        trained = 0
        for t in (t for g in groups for t in g.scored):
            seen[t.id] = seen.get(t.id, 0) + 1
            trained += t.sampled
            late = (s for s in t.versions if mesh.version.step - s.version.step > plan.staleness)
            over_bound += sum(sum(t.loss_mask[s.start : s.end]) for s in late)
        row = flow.metrics()
        masked += int(row.get("masked_tokens", 0))
        lag_sum, lag_count = lag_sum + row["lag"], lag_count + 1
        batches.append((loop.time(), sum(len(g.scored) for g in groups), trained))
        EngineModel.cpu_s += time.process_time() - began  # the model trainer's, not the controller's
        await mesh.train(chance.expovariate(1) * plan.jitter + 1 - plan.jitter)
        flow.trained(mesh.version)
        await flow.publish()
        if step % 500 == 499:
            await flow.before_checkpoint()
            flow.after_checkpoint(mesh.version)
    await flow.delivered()
    if killer is not None:
        killer.cancel()
    end = loop.time()
    if step := mesh.version.step:
        await flow.before_checkpoint()
        flow.after_checkpoint(PolicyVersion(0, step))
    await flow.close()
    work = time.process_time() - cpu - EngineModel.cpu_s
    await router.close()
    report = audit(folder, tokens=False)
    skip = min(3 * (plan.staleness + 1), plan.steps // 3)  # until the pipe is full
    last = len(batches) - min(plan.staleness + 1, plan.steps // 3)  # from then on nothing new is begun, and the slowest are waited for
    steady = batches[skip:last]
    spans = [(b[0] - a[0]) for a, b in zip(steady, steady[1:])] or [end]
    period = sum(spans)
    generated = sum(e.stats.tokens for e in engines)
    return Outcome(
        step_s=statistics.mean(spans),
        drain_s=batches[-1][0] - batches[last - 1][0],
        trained_per_s=sum(n for _, n, _ in steady[1:]) / period if len(steady) > 1 else batches[0][1] / end,
        trained_tokens_per_s=sum(n for *_, n in steady[1:]) / period if len(steady) > 1 else batches[0][2] / end,
        generated_tokens=generated,
        masked=masked / max(1, generated),
        dropped=report.dropped,
        deaths=EngineModel.deaths,
        lag=lag_sum / max(1, lag_count),
        engines_busy=sum(e.stats.busy_s for e in engines) / (plan.engines * end),
        in_flight=peak,
        controller_core=work / end,
        controller_us=1e6 * work / max(1, report.issued),
        lost=abs(report.issued - report.trained - sum(report.dropped.values()) - report.held) + len(report.problems),
        doubled=sum(n - 1 for n in seen.values()),
        max_lag=report.max_lag,
        over_bound=over_bound,
        virtual_s=end,
        real_s=time.perf_counter() - real,
    )


def from_run(folder: Path) -> dict[str, Any]:
    """Lengths, speeds and seconds of a run at staleness 0, from its ledger and metrics (`simulated_from.read`)."""
    from simulated_from import read

    return read(folder, MESH_UPDATE_S)


def measured_beside() -> float:
    from simulated_from import beside

    found = beside()
    print(f"two processes that work at once take {found:.2f} times as long here as one")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = parser.add_argument
    number("--engines", type=int, default=8)
    number("--slots", type=int, default=8, help="samples that an engine decodes at once")
    number("--groups", type=int, default=32, help="groups a step")
    number("--samples", type=int, default=8, help="samples a group")
    number("--tokens", type=float, default=200, help="mean length of a sample")
    number("--sigma", type=float, default=1.0, help="of the log-normal lengths; 1 puts p99 at 10 times the median")
    number("--max-tokens", type=int, default=0, help="longest sample; 0: no limit")
    number("--token-s", type=float, default=0.02, help="seconds of one decode step")
    number("--running-s", type=float, default=0.0, help="more of it for each sample that runs")
    number("--train-s", type=float, help="seconds of training a step; default: as long as generation needs")
    number("--reward-s", type=float, default=0.0)
    number("--update-s", type=float, default=MESH_UPDATE_S)
    number("--deaths-s", type=float, default=0.0, help="mean seconds between two deaths of an engine; 0: none die")
    number("--restart-s", type=float, default=30.0, help="seconds until a dead engine serves again")
    number("--fails", type=float, default=0.0, help="share of samples whose environment fails")
    number("--rejects", type=float, default=0.0, help="share of groups that a filter turns away")
    number("--jitter", type=float, default=0.0, help="share of the training time that is random")
    number("--beside", default="1", help="how many times longer trainer and engines take while both work, where they share a machine; measure: find out on this one")
    number("--staleness", type=int, default=2)
    number("--late", choices=("mask", "wait"), default="mask")
    number("--oversample", type=float, default=0.0)
    number("--steps", type=int, default=60)
    number("--seed", type=int, default=0)
    number("--from", dest="run", type=Path, help="a run directory to take lengths and speeds from")
    number("--plot", type=Path, help="write a picture (needs matplotlib) of throughput over staleness")
    number("--json", action="store_true", help="end with one line of JSON")
    a = parser.parse_args()
    values = {k: v for k, v in vars(a).items() if k not in ("run", "plot", "json")}
    values["beside"] = measured_beside() if a.beside == "measure" else float(a.beside)
    if a.run:
        taken = from_run(a.run)
        taken["train_s"] += taken.pop("rest_s")
        values |= {**taken, "slots": max(a.slots, taken["groups"] * taken["samples"])}
        print(f"from {a.run}: {len(taken['lengths'])} lengths, mean {statistics.mean(taken['lengths']):.1f}; "
              f"a decode step takes {1e3 * taken['token_s']:.2f} ms + {1e3 * taken['running_s']:.3f} ms a sample, {1e3 * taken['reward_s']:.0f} ms around each; training {taken['train_s']:.3f} s, update {taken['update_s']:.3f} s")
    plan = Plan(**{**values, "train_s": values["train_s"] if values["train_s"] is not None else 0.0})
    if values["train_s"] is None:
        plan.train_s = plan.engines_s
    bound_s = max(plan.engines_s, plan.train_s)
    outcomes = {}
    for staleness in sorted({0, plan.staleness} | (set(range(plan.staleness + 3)) if a.plot else set())):
        with tempfile.TemporaryDirectory(prefix="simulate-") as folder:
            outcomes[staleness] = simulate(msgspec.structs.replace(plan, staleness=staleness), Path(folder))
    one, sync = outcomes[plan.staleness], outcomes[0]
    print(report(plan, outcomes, bound_s))
    if a.plot:
        plot(a.plot, plan, outcomes, bound_s)
    result = {
        "async_over_bound": bound_s / one.step_s,
        "async_over_sync": sync.step_s / one.step_s,
        "engines": plan.engines,
        "in_flight": one.in_flight,
        "controller_core": one.controller_core,
        "lost": one.lost + sync.lost,
        "doubled": one.doubled + sync.doubled,
        "step_s": one.step_s,
        "max_lag": one.max_lag,
        "over_bound": one.over_bound,
        "masked": one.masked,
    }
    if a.json:
        print(json.dumps(result))


def report(plan: Plan, outcomes: dict[int, Outcome], bound_s: float) -> str:
    lines = [
        f"{plan.engines} engines of {plan.slots} slots, {plan.groups} groups of {plan.samples} a step",
        f"a batch takes the engines {plan.engines_s:.2f} s with all slots full, the trainer {plan.train_s:.2f} s: no loop can do a step in less than {bound_s:.2f} s",
    ]
    for staleness, o in outcomes.items():
        lines.append(
            f"staleness {staleness}: {o.step_s:8.2f} s a step ({bound_s / o.step_s:4.0%} of the bound), engines busy {o.engines_busy:4.0%}, "
            f"mean lag of a batch's oldest tokens {o.lag:.2f}, at most {o.max_lag}; tokens over the bound and not trained {o.masked:.2%}; "
            f"the last {min(staleness + 1, plan.steps // 3)} of {plan.steps} steps, with nothing left to begin, {o.drain_s:.0f} s; "
            f"{f'{o.deaths} deaths; ' if o.deaths else ''}at most {o.in_flight} in flight; controller {o.controller_core:.2f} core ({o.controller_us:.0f} us a sample); {o.real_s:.1f} s real for {o.virtual_s:.0f} s"
        )
    best = min(outcomes, key=lambda k: (round(outcomes[k].step_s / bound_s, 2), k))
    slower = "the engines" if plan.engines_s > plan.train_s * 1.05 else "the trainer" if plan.train_s > plan.engines_s * 1.05 else "neither"
    wanted = math.ceil(plan.engines * plan.engines_s / plan.train_s) if plan.train_s else plan.engines
    lines.append(
        f"staleness {best} is the least that is worth its lag; the slower part is {slower}; with {wanted} engines generation would keep up with training"
    )
    return "\n".join(lines)


def plot(path: Path, plan: Plan, outcomes: dict[int, Outcome], bound_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(outcomes), [plan.groups * plan.samples / o.step_s for o in outcomes.values()], marker="o", label="simulated")
    axes.axhline(plan.groups * plan.samples / bound_s, linestyle="--", label="bound of the parts")
    axes.set_xlabel("staleness")
    axes.set_ylabel("samples trained per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot in {path}")


if __name__ == "__main__":
    main()
