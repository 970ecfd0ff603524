#!/usr/bin/env python3
"""How much KV is computed and how much is reused: groups and conversations on real engines, each mechanism on and off.

    ./tools/run tools/bench_kv.py [--engines 1 2] [--groups 4] [--json]

Groups of 8 with a shared prompt of 500 tokens arrive together; conversations of 6 turns run beside each other. `computed`
and `reused` are SGLang's own counts of prompt tokens; `times` is how often a shared prompt (or a turn) was computed, 1 at
best. Greedy tokens must be the same in every way of running; the first that differ end the benchmark. `cross_engine_hits` is the
part of prompts that one engine computed and another read from files, `handover_saved` the same for samples handed over while they ran.
`pd_tokens_equal` is 1 where an engine that prefills and one that decodes sample the tokens of one engine, else 0;
`kv_over_nixl_raw` is the speed at which the KV of prompts goes from the first to the second, over that of NIXL alone for as many
pages of that size between two processes, measured in turns with it.

With --json the last line is one object. Its keys are numbers of the largest count of engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PREFIX, SAMPLES, TURNS, NEW = 500, 8, 6, 40
WAYS = {
    "no cache": ["rollout.engine.disable_radix_cache=true", "rollout.overlap_score_weight=0", "rollout.in_batch_prefix_caching=false"],
    "cache alone": ["rollout.overlap_score_weight=0", "rollout.in_batch_prefix_caching=false"],
    "by prefix": ["rollout.in_batch_prefix_caching=false"],
    "by prefix, one computes": [],
}
"""What is on, as changes to the mesh file."""
APART = ["rollout.prefill.replicas=1", "rollout.threads=1"]
ROUNDS, WARM = 25, 20
"""Prompts whose transfer is measured, and those before them: the first make the connection, all touch what KV there is for the
first time."""


async def measure(folder: Path, engines: int, groups: int, overrides: list[str]) -> dict[str, Any]:
    """One way of running: tokens computed and reused, seconds, and all greedy tokens."""
    from milkweed.config import load_mesh
    from milkweed.fleet import Fleet
    from milkweed.rollout import Router
    from milkweed.types import Sampling

    greedy = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)

    async def conversation(router: Router, number: int) -> list[int]:
        ids, said = [(number * 17 + i) % 250 + 8 for i in range(100)], []
        for turn in range(TURNS):
            c = await router.sample(ids, greedy)
            said += c.token_ids
            ids = [*ids, *c.token_ids, *((turn * 31 + i) % 250 + 8 for i in range(NEW))]
        return said

    mesh = load_mesh("local", [f"rollout.replicas={engines}", "rollout.threads=1", *overrides])
    async with await Fleet.start(mesh) as fleet:
        router = await Router.spawn(fleet, str(folder))
        try:
            await asyncio.gather(*(router.sample([9, 10 + i], greedy) for i in range(engines)))  # the first call of all is slow
            result: dict[str, Any] = {}
            prompts = [[(g * 53 + 7 * i) % 250 + 8 for i in range(PREFIX)] for g in range(groups)]
            start, before = time.perf_counter(), router.kv
            done = await asyncio.gather(*(router.sample(p, greedy) for p in prompts for _ in range(SAMPLES)))
            result["groups"] = spent(before, router.kv, time.perf_counter() - start)
            # each sample computes its last token anyway
            least = groups * (PREFIX + SAMPLES - 1)
            result["groups"]["times"] = result["groups"]["computed"] / least
            start, before = time.perf_counter(), router.kv
            said = await asyncio.gather(*(conversation(router, n) for n in range(groups * 2)))
            result["turns"] = spent(before, router.kv, time.perf_counter() - start)
            # a turn computes what is new, and the last token sampled before it
            least = groups * 2 * (100 + (TURNS - 1) * (NEW + 1))
            result["turns"]["times"] = result["turns"]["computed"] / least
            result["tokens"] = [c.token_ids for c in done] + said
            return result
        finally:
            await router.close()


async def across(folder: Path, groups: int) -> dict[str, float]:
    """Which part of prompts that one engine has computed another one reads from files; and of prompts and what was sampled, for
    those that run when their engine is taken out of service and go on elsewhere."""
    from milkweed.config import load_mesh
    from milkweed.fleet import Fleet
    from milkweed.rollout import Router
    from milkweed.types import Sampling

    greedy = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
    mesh = load_mesh("local", ["rollout.replicas=2", "rollout.threads=1", "rollout.kv_tier.memory_ratio=2", "rollout.kv_tier.files_gb=1"])
    async with await Fleet.start(mesh) as fleet:
        router = await Router.spawn(fleet, str(folder))
        try:
            said = []
            for chosen in router.crew:
                for engine in router.crew:
                    engine.standby = engine is not chosen
                router.crew.by_load.rebuild()
                start = time.perf_counter()
                done = [await router.sample([(g * 53 + 7 * i) % 250 + 8 for i in range(PREFIX)], greedy) for g in range(groups)]
                seconds = time.perf_counter() - start
                said.append([c.token_ids for c in done])
                print(f"{chosen.replica.name}: {groups} prompts in {seconds:.2f} s, cached {sum(c.cached_tokens for c in done)}", flush=True)
                await asyncio.sleep(1)  # what was computed is written beside the loop
            if said[0] != said[1]:
                raise SystemExit("an engine that reads KV from files samples other tokens than the one that computed it")
            report = {"cross_engine_hits": router.kv["from_files"] / (groups * PREFIX)}
            for engine in router.crew:
                engine.standby = engine.replica.name != "rollout0"
            router.crew.by_load.rebuild()
            long = Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)
            running = [asyncio.create_task(router.sample([(g * 91 + 5 * i) % 250 + 8 for i in range(PREFIX)], long)) for g in range(groups)]
            await asyncio.sleep(1)
            if router.load["rollout0"] != groups:
                raise SystemExit("the samples to hand over ended too soon: give --groups a larger number")
            for engine in router.crew:
                engine.standby = False
            router.crew.by_load.rebuild()
            before = router.kv["rollout1"]
            await router.leave("rollout0", within_s=0)
            await asyncio.gather(*running)
            r = spent(before, router.kv["rollout1"], 0)
            return report | {"handover_saved": r["reused"] / (r["reused"] + r["computed"])}
        finally:
            await router.close()


async def moved(folder: Path) -> float:
    """How fast KV goes from an engine that prefills to one that decodes, over NIXL alone: medians of ROUNDS prompts each."""
    from kv_raw import Raw

    from milkweed.config import load_mesh
    from milkweed.fleet import Fleet
    from milkweed.rollout import Router
    from milkweed.rollout.sglang_pairs import PAGE
    from milkweed.types import Sampling

    one, length = Sampling(temperature=0.0, max_tokens=1), 992
    async with await Fleet.start(load_mesh("local", ["rollout.replicas=1", *APART])) as fleet:
        router = await Router.spawn(fleet, str(folder))
        raw: Raw | None = None
        try:
            ours, alone = [], []
            for number in range(-WARM, ROUNDS):
                before = router.kv
                await router.sample([(number * 53 + 7 * i) % 250 + 8 for i in range(length)], one)
                while router.load["prefill0"]:
                    await asyncio.sleep(0.01)
                now = router.kv
                tokens, nbytes, us = (now[k] - before[k] for k in ("moved_tokens", "moved_bytes", "moved_us"))
                if raw is None:
                    buffers = 2 * json.loads((folder / "config.json").read_text())["num_hidden_layers"]
                    raw = Raw(buffers, pages=16384 // PAGE, page_bytes=nbytes * PAGE // tokens // buffers)
                seconds = await asyncio.to_thread(raw.write, tokens // PAGE)
                if number >= 0:
                    ours.append(nbytes / us / 1e3)
                    alone.append(nbytes / seconds / 1e9)
            mine, its = statistics.median(ours), statistics.median(alone)
            print(f"KV of {length} tokens, {nbytes / 1e6:.1f} MB: {mine:.2f} GB/s between engines, {its:.2f} GB/s by NIXL alone", flush=True)
            return mine / its
        finally:
            if raw is not None:
                raw.close()
            await router.close()


def spent(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, float]:
    return {key: after[key] - before[key] for key in ("computed", "reused")} | {"seconds": seconds}


def sharpened(folder: Path) -> Path:
    """New weights give nearly even distributions, where rounding decides which token is the likeliest; these do not."""
    from safetensors.torch import load_file, save_file

    file = str(folder / "model.safetensors")
    save_file({n: t * (1 if "norm" in n else 4) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="how many engines, one count after the other")
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 samples; twice as many conversations")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    if min(arguments.engines) < 1 or arguments.groups < 1:
        parser.error("--engines and --groups must be at least 1")
    from milkweed.models import new_qwen3

    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as folder:
        model = sharpened(new_qwen3(Path(folder) / "model", hidden=256, layers=6))
        reference = None
        for engines in arguments.engines:
            for way, overrides in WAYS.items():
                result = asyncio.run(measure(model, engines, arguments.groups, overrides))
                reference = reference or result["tokens"]
                if result["tokens"] != reference:
                    raise SystemExit(f"{way} on {engines} engines samples other tokens than the first way of running")
                for load in ("groups", "turns"):
                    r = result[load]
                    print(
                        f"{engines} engine{'s' * (engines > 1)}, {way:24} {load:6} computed {r['computed']:6} reused {r['reused']:6} "
                        f"times {r['times']:5.2f} in {r['seconds']:6.2f} s", flush=True,
                    )  # fmt: skip
                report |= {"engines": engines, "group_prefix_computed": result["groups"]["times"], "turn_computed": result["turns"]["times"]}
        report |= asyncio.run(across(model, arguments.groups))
        result = asyncio.run(measure(model, 1, arguments.groups, APART))
        report["pd_tokens_equal"] = float(result["tokens"] == reference)
        for load in ("groups", "turns"):
            r = result[load]
            print(f"one prefills, one decodes           {load:6} computed {r['computed']:6} reused {r['reused']:6} in {r['seconds']:6.2f} s", flush=True)
        report["kv_over_nixl_raw"] = asyncio.run(moved(model))
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
