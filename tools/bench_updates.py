#!/usr/bin/env python3
"""Updates of real engines by a real trainer, against memcpy and SGLang's own three ways. Part of bench_transfer.py.

    tools/bench_updates.py [--mb 100] [--engines 1 4] [--repeats 5]

Before each update the trainer makes an optimiser step, so that every byte is new; between updates a memcpy of as many
bytes is timed in this process. `pause` is what the scheduler spends between its last step under the old version and its
readiness under the new (retract, flush, copy, continue; no requests run); `update` is the controller's time from the
order to publish until the engines serve. SGLang's ways are timed inside one call, without what brings the weights to
the caller. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from milkweed.fleet.processes import everyone, kill, library_shm, remove_named
from milkweed.transfer.arena import Arena

PAUSED = ("retract", "flush", "copy", "continue")


def sized_model(folder: Path, mb: int) -> Path:
    """A Qwen3 of about `mb` MB in float32, with matrices as large models have them."""
    from milkweed.models import new_qwen3

    hidden = 512 if mb < 300 else 1024
    layer = (4 * hidden * hidden + 3 * hidden * 4 * hidden) * 4
    layers = max(1, round(mb * 1e6 / layer))
    return new_qwen3(folder, hidden=hidden, layers=layers, heads=8, kv_heads=8, head_dim=hidden // 8, intermediate=4 * hidden)


def step_batch():
    import torch

    from milkweed.types import Batch

    tokens = torch.arange(1, 33)[None]
    mask = torch.ones(1, 32, dtype=torch.bool)
    mask[0, 0] = False
    zeros = torch.zeros(1, 32)
    return Batch(
        tokens, torch.arange(32)[None], torch.zeros(1, 32, dtype=torch.long), mask, mask.float() / 31, zeros, zeros,
        totals={"tokens": 31.0},
    )  # fmt: skip


def nll(batch, policy):
    return -policy.logprobs


async def updates(model: Path, engines: int, repeats: int) -> dict[str, float]:
    """Medians, in seconds, over shared memory and over NIXL."""
    from milkweed.config import load_mesh
    from milkweed.runs.mesh import up

    out: dict[str, float] = {}
    live = await up(load_mesh("local", [f"rollout.replicas={engines}"]), model=model, roles=("trainer", "rollout"))
    try:
        assert live.trainer is not None
        await live.publish()
        plane = live.weights
        assert plane is not None
        for way in ("shm", "nixl"):
            host = plane.hosts[0]
            if way == "nixl":
                await host.puller.call_one("revoke", deadline_s=60)
                host.grant, host.way = None, "nixl"
            rounds: dict[str, list[float]] = {}
            for count in range(repeats + 2):
                await live.trainer.update(step_batch(), nll)
                measured = await live.publish()
                reports = plane.report.engines.values() if plane.report else []
                found = {
                    "memcpy": memcpy_s(int(measured["bytes"])), "update": measured["update"], "publish": measured["publish"],
                    "pull": measured["pull"], "pause": max(sum(r.parts[p] for p in PAUSED) for r in reports) / 1e3,
                    "copy": max(r.parts["copy"] for r in reports) / 1e3, "bytes": measured["bytes"],
                    "commit": measured["commit"],
                }  # fmt: skip
                if count > 1:  # both slots are warm
                    for name, value in found.items():
                        rounds.setdefault(name, []).append(value)
            out |= {f"{way}_{name}": statistics.median(values) for name, values in rounds.items()}
    finally:
        await live.down()
    return out


_arenas: list[Arena] = []


def memcpy_s(nbytes: int) -> float:
    """Of hugepage memory that has been touched: the fastest copy there is."""
    if not _arenas or _arenas[0].nbytes < nbytes:
        _arenas[:] = [Arena(nbytes), Arena(nbytes)]
    began = time.perf_counter()
    ctypes.memmove(_arenas[0].address, _arenas[1].address, nbytes)
    return time.perf_counter() - began


def sglang_own(model: str, repeats: int) -> dict[str, float]:
    """Medians of SGLang's own updates from disk, from tensors and over gloo."""
    from milkweed.rollout.sglang_engine import engine_arguments

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    import sglang
    from safetensors.torch import load_file

    weights = load_file(f"{model}/model.safetensors")
    names = sorted(weights)
    shapes = [list(weights[n].shape) for n in names]
    engine = sglang.Engine(**engine_arguments(model, cpu=True))
    litter = library_shm(p.pid for p in everyone().values() if p.pid == os.getpid() or p.parent == os.getpid())
    sender = subprocess.Popen([sys.executable, __file__, "--send", str(port), "--model", model, "--repeats", str(repeats)])

    def session(work) -> None:
        engine.begin_weight_update()
        work()
        engine.end_weight_update()

    def gloo() -> None:
        engine.update_weights_from_distributed(names, ["float32"] * len(names), shapes, group_name="bench")

    try:
        engine.init_weights_update_group("127.0.0.1", port, 1, 2, "bench", backend="gloo")
        ways = {
            "disk": lambda: engine.update_weights_from_disk(model),
            "tensor": lambda: session(lambda: engine.update_weights_from_tensor(list(weights.items()))),
            "distributed": lambda: session(gloo),
        }
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for count in range(repeats + 1):
            for name, work in ways.items():
                began = time.perf_counter()
                work()
                if count:
                    rounds[name].append(time.perf_counter() - began)
    finally:
        sender.kill()
        sender.wait()
        engine.shutdown()
        remove_named(litter)  # SGLang leaves its semaphores and figures of load behind
    return {f"sglang_{name}": statistics.median(values) for name, values in rounds.items()}


def send(port: int, model: str, repeats: int) -> None:
    """The trainer's side of SGLang's update over a process group."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from sglang.srt.utils import init_custom_process_group

    weights = load_file(f"{model}/model.safetensors")
    where = f"tcp://127.0.0.1:{port}"
    group = init_custom_process_group(backend="gloo", init_method=where, world_size=2, rank=0, group_name="bench")
    for _ in range(repeats + 1):
        for name in sorted(weights):
            dist.broadcast(weights[name], src=0, group=group)
    time.sleep(60)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def in_process_of_its_own(arguments: list[str], deadline_s: float) -> dict[str, float]:
    from milkweed.rollout.sglang_engine import engine_environment

    env = os.environ | engine_environment(cpu=True)
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=deadline_s)
    finally:
        group = [pid for pid in everyone() if _group(pid) == process.pid]
        litter = library_shm(group)
        kill(group)
        process.wait()
        remove_named(litter)
    lines = [line for line in out.decode(errors="replace").splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"bench_updates.py {' '.join(arguments)} gave no result (exit {process.returncode})")
    return json.loads(lines[-1])


def run(mb: int, engines: list[int], repeats: int) -> dict[str, float]:
    """The ratios of the issue's table, all from one run."""
    with tempfile.TemporaryDirectory() as place:
        model = str(sized_model(Path(place) / "model", mb))
        out: dict[str, float] = {"load": os.getloadavg()[0]}
        own = in_process_of_its_own(["--own", "--model", model, "--repeats", str(repeats)], 600)
        for n in engines:
            found = in_process_of_its_own(["--updates", str(n), "--model", model, "--repeats", str(repeats)], 900)
            print(f"{n} engines: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
            out[f"update_over_memcpy_{n}"] = found["shm_update"] / found["shm_memcpy"]
            out[f"nixl_update_over_memcpy_{n}"] = found["nixl_update"] / found["nixl_memcpy"]
            if n == 1:
                best = min(own.values())
                out["pause_over_memcpy"] = found["shm_pause"] / found["shm_memcpy"]
                out["pause_gain_over_sglang"] = best / found["shm_pause"]
                out["update_gain_over_sglang"] = best / found["shm_update"]
                out["mb"] = found["shm_bytes"] / 1e6
        print("  ".join(f"{k} {v:.4g}" for k, v in own.items()), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send is not None:
        return send(options.send, options.model, options.repeats)
    if options.own:
        result = sglang_own(options.model, options.repeats)
    elif options.updates is not None:
        result = asyncio.run(updates(Path(options.model), options.updates, options.repeats))
    else:
        result = run(options.mb, options.engines, options.repeats)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
