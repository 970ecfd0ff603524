#!/usr/bin/env python3
"""How fast the transfer plane is, against memcpy and the kernel's own copy between processes, side by side in one run.

    tools/bench_transfer.py [--mb 10 100 400] [--repeats 5] [--engines 1 2 4] [--no-links] [--no-network] [--json]

One process publishes, this one pulls, as a trainer rank and a host's puller do; an engine's copy out of shared memory
is done by torch, without an engine. Figures are medians of the repeats, taken in turn so that other work on the machine
falls on all of them alike. With --json the last line is one JSON object about the largest size:

    memcpy_gb_s, readv_gb_s, pull_gb_s (READ and verify), pull_over_readv (of speeds), publish_s, pull_s (READ, verify,
    assemble), copy_s, tensors_over_memcpy (whole tensors: publish to copied, in times of memcpy), idle_agent_core

Then, unless their option says no: real engines and a real trainer at the largest size (bench_updates.py), which give
pause_over_memcpy, update_over_memcpy_N, nixl_update_over_memcpy_N, pause_gain_over_sglang and update_gain_over_sglang;
TCP beside gloo and Monarch's RDMABuffer (bench_links.py), which give tcp_over_gloo_64k and tcp_over_gloo_64m; and hosts
joined by a network only (bench_network.py; root alone can make them).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from milkweed.transfer.arena import Arena
from milkweed.transfer.manifest import join
from milkweed.transfer.probe import readv_function
from milkweed.transfer.puller import Puller
from milkweed.transfer.staging import open_staged
from milkweed.types import PolicyVersion

ROWS = 1024
ANSWER_S = 120.0


def serve(connection: Connection) -> None:
    """The publishing process: publishes `(step, mb)` on demand and answers with the manifest and the seconds taken."""
    import torch

    from milkweed.transfer.publisher import Publisher

    torch.set_num_threads(1)
    publisher, tensors, made = Publisher("bench"), [], 0
    connection.send(os.getpid())
    while True:
        try:
            step, mb = connection.recv()
        except EOFError:
            return
        if mb != made:
            made, tensors = mb, model(mb)
        if step < 0:  # idle for that many seconds, and say what it cost
            began = time.process_time()
            time.sleep(-step)
            connection.send((time.process_time() - began) / -step)
            continue
        shards = [(f"w{i:04d}", t, tuple(t.shape), (0, 0)) for i, t in enumerate(tensors)]
        began = time.perf_counter()
        manifest = publisher.publish(PolicyVersion(0, step), shards, [])
        connection.send((manifest, time.perf_counter() - began))


def model(mb: int) -> list:
    """`mb` MB of float32 in matrices of 4 MB and one that is smaller."""
    import torch

    rows = mb * 1_000_000 // (4 * ROWS)
    return [torch.randn(min(ROWS, rows - start), ROWS) for start in range(0, rows, ROWS)]


@contextmanager
def publisher_process() -> Iterator[Connection]:
    """The connection to a publishing process, which ends with the block."""
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, __file__, "--serve", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.wait()


def answer(connection: Connection):
    """What the publishing process says next; raises TimeoutError if it says nothing."""
    if not connection.poll(ANSWER_S):
        raise TimeoutError(f"the publishing process did not answer within {ANSWER_S:g} s")
    return connection.recv()


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(connection: Connection, pid: int, puller: Puller, mb: int, repeats: int, step: int) -> dict[str, float]:
    """Medians at one size; the first round, which allocates and connects, is not counted."""
    rounds: dict[str, list[float]] = {k: [] for k in ("memcpy", "readv", "read", "publish", "pull", "copy", "update")}
    here, other = Arena(mb * 1_000_000), Arena(mb * 1_000_000)
    readv, engine, nbytes = readv_function(), None, 0
    for count in range(repeats + 1):
        connection.send((step + count, mb))
        ranked, publish_s = answer(connection)
        manifest, nbytes = join([ranked]), ranked.nbytes
        staged = asyncio.run(puller.pull(manifest, 120.0))
        views = open_staged(staged).tensors()
        engine = engine or {name: view.clone() for name, view in views.items()}
        copy_s = timed(lambda: [engine[name].copy_(view) for name, view in views.items()])
        found = {
            "memcpy": timed(lambda: ctypes.memmove(here.address, other.address, nbytes)),
            "readv": timed(lambda: readv(pid, here.address, ranked.address, nbytes)),
            "read": puller.status()["last"]["read_s"],
            "publish": publish_s,
            "pull": staged.seconds,
            "copy": copy_s,
            "update": publish_s + staged.seconds + copy_s,
        }
        if count:
            for name, seconds in found.items():
                rounds[name].append(seconds)
    median = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    return {
        "mb": mb,
        "memcpy_gb_s": nbytes / median["memcpy"] / 1e9,
        "readv_gb_s": nbytes / median["readv"] / 1e9,
        "pull_gb_s": nbytes / median["read"] / 1e9,
        "pull_over_readv": median["readv"] / median["read"],
        "publish_s": median["publish"],
        "pull_s": median["pull"],
        "copy_s": median["copy"],
        "tensors_over_memcpy": median["update"] / median["memcpy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100, 400], help="sizes in MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 4], help="numbers of real engines to update")
    parser.add_argument("--links", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--network", action=argparse.BooleanOptionalAction, default=os.geteuid() == 0)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(Connection(options.serve))
    import torch

    torch.set_num_threads(1)
    with publisher_process() as connection:
        pid, step, result = answer(connection), 1, {}
        for mb in sorted(options.mb):
            puller = Puller(f"bench{uuid.uuid4().hex[:6]}")
            try:
                result = measure(connection, pid, puller, mb, options.repeats, step)
            finally:
                puller.close()
            step += options.repeats + 1
            print("  ".join(f"{name} {value:.4g}" for name, value in result.items()), flush=True)
        connection.send((-4.0, max(options.mb)))
        result["idle_agent_core"] = answer(connection)
        print(f"idle_agent_core {result['idle_agent_core']:.3f}", flush=True)
    if options.engines:
        from bench_updates import run as real_updates

        result |= real_updates(max(options.mb), options.engines, options.repeats)
    more: dict[str, float] = {}
    if options.links:
        import bench_links

        more |= bench_links.run(options.repeats)
    if options.network:
        import bench_network

        more |= bench_network.run(max(options.mb), options.repeats)
    print("  ".join(f"{name} {value:.4g}" for name, value in more.items()), flush=True)
    result |= more
    if options.json:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
