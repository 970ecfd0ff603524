#!/usr/bin/env python3
"""Other ways to move bytes between two processes, beside this plane forced on TCP. Part of bench_transfer.py.

    tools/bench_links.py [--repeats 5]

The plane pulls and verifies over TCP (UCX_TLS=tcp) a model whose tensors are of 64 KiB, and one of 64 MiB; gloo sends
the same tensors one by one, as they are; gloo's broadcast and Monarch's RDMABuffer (which is TCP where there is no such
hardware) move the whole as one. Medians, taken in turn. Ends with one line of JSON: `tcp_over_gloo_64k`,
`tcp_over_gloo_64m` (of speeds), and `tcp_gb_s_*`, `gloo_gb_s_*`, `broadcast_gb_s`, `rdma_buffer_gb_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from monarch.actor import Actor, endpoint

SIZES = {"64k": (64 << 10, 32 << 20), "64m": (64 << 20, 256 << 20)}
"""A tensor and all of them, in bytes."""
ANSWER_S = 120.0


def packing(name: str) -> Any:
    """For an engine that has the tensors as they are."""
    from milkweed.transfer.packing import Packing
    from milkweed.transfer.plan import EngineLayout, Parameter, Piece, RankLayout

    block, total = SIZES[name]
    shapes = {f"w{i:04d}": (block // 4,) for i in range(total // block)}
    parameters = [Parameter(n, "float32", s, i * block, block) for i, (n, s) in enumerate(shapes.items())]
    pieces = [Piece(n, (0,), s, i, 0, (1,)) for i, (n, s) in enumerate(shapes.items())]
    return Packing(EngineLayout(shapes, [RankLayout(parameters, pieces, total)]), [(n, (0,), s) for n, s in shapes.items()])


def join_gloo(port: int, rank: int) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return dist


def serve(connection: Connection, port: int) -> None:
    """The sending process: publishes, sends or broadcasts on demand."""
    import torch

    from milkweed.transfer.publisher import Publisher
    from milkweed.types import PolicyVersion

    torch.set_num_threads(1)
    publishers = {name: Publisher(f"bench{name}") for name in SIZES}
    packings = {name: packing(name) for name in SIZES}
    data = {name: torch.randn(total // 4) for name, (_, total) in SIZES.items()}
    dist = join_gloo(port, 0)
    while True:
        try:
            what, name, step = connection.recv()
        except EOFError:
            return
        if what == "publish":
            data[name][:: 1 << 12] += 1  # every chunk is new
            tensors = data[name].split(SIZES[name][0] // 4)
            connection.send(publishers[name].publish_packed(PolicyVersion(0, step), packings[name], tensors, []))
        elif what == "send":
            for block in data[name].split(SIZES[name][0] // 4):
                dist.send(block, 1)
        else:
            dist.broadcast(data[name], 0)


def links(repeats: int) -> dict[str, float]:
    """TCP and gloo, block by block, and the broadcast; the reading side."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    connection, theirs = Pipe()
    command = [sys.executable, __file__, "--serve", str(theirs.fileno()), "--port", str(port)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # before UCX is up: nothing may be forked then
    theirs.close()
    try:
        return _read(connection, port, repeats)
    finally:
        process.kill()
        process.wait()


def _read(connection: Connection, port: int, repeats: int) -> dict[str, float]:
    import torch

    from milkweed.transfer.manifest import join
    from milkweed.transfer.puller import Puller

    torch.set_num_threads(1)
    dist = join_gloo(port, 1)
    found: dict[str, list[float]] = {}
    for name, (block, total) in SIZES.items():
        here = torch.ones(total // 4)
        puller = Puller(f"bench{uuid.uuid4().hex[:6]}")

        def tcp(step: int, puller: Puller = puller, name: str = name) -> float:
            connection.send(("publish", name, step))
            if not connection.poll(ANSWER_S):
                raise TimeoutError(f"the sending process did not answer within {ANSWER_S:g} s")
            asyncio.run(puller.pull(join([connection.recv()]), ANSWER_S))
            return puller.status()["last"]["read_s"]

        def gloo(step: int, here: Any = here, name: str = name, block: int = block) -> float:
            connection.send(("send", name, step))
            parts = here.split(block // 4)
            dist.recv(parts[0], 0)
            began = time.perf_counter()  # the first block has come: the sender is at it
            for part in parts[1:]:
                dist.recv(part, 0)
            return (time.perf_counter() - began) * len(parts) / (len(parts) - 1)

        def broadcast(step: int, here: Any = here, name: str = name) -> float:
            connection.send(("broadcast", name, step))
            began = time.perf_counter()
            dist.broadcast(here, 0)
            return time.perf_counter() - began

        ways: dict[str, Callable[[int], float]] = {f"tcp_gb_s_{name}": tcp, f"gloo_gb_s_{name}": gloo}
        if name == "64m":
            ways["broadcast_gb_s"] = broadcast
        try:
            for step in range(repeats + 1):
                for way, work in ways.items():
                    seconds = work(step)
                    if step:
                        found.setdefault(way, []).append(total / seconds / 1e9)
        finally:
            puller.close()
    out = {way: statistics.median(values) for way, values in found.items()}
    return out | {f"tcp_over_gloo_{n}": out[f"tcp_gb_s_{n}"] / out[f"gloo_gb_s_{n}"] for n in SIZES}


class Holder(Actor):
    """Has the bytes that another process reads through Monarch."""

    @endpoint
    async def offer(self, nbytes: int) -> Any:
        import torch
        from monarch.rdma import RDMABuffer

        self._memory = torch.ones(nbytes, dtype=torch.uint8)
        return RDMABuffer(self._memory)


class Reader(Actor):
    """Reads another process's bytes through Monarch."""

    @endpoint
    async def read(self, buffer: Any, nbytes: int, repeats: int) -> list[float]:
        import torch

        here, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            await buffer.read_into(here, timeout=60)
            seconds.append(time.perf_counter() - began)
        if not bool((here == 1).all()):
            raise RuntimeError("RDMABuffer read other bytes than were there")
        return seconds[1:]


async def rdma_buffer(repeats: int) -> dict[str, float]:
    from milkweed.config import load_mesh
    from milkweed.fleet import Fleet

    nbytes = SIZES["64m"][1]
    async with await Fleet.start(load_mesh("local")) as fleet:
        holder = await fleet.spawn("holder", 0, Holder)
        reader = await fleet.spawn("reader", 0, Reader)
        buffer = await holder.call_one("offer", nbytes, deadline_s=ANSWER_S)
        seconds = await reader.call_one("read", buffer, nbytes, repeats, deadline_s=ANSWER_S)
    return {"rdma_buffer_gb_s": nbytes / statistics.median(seconds) / 1e9}


def run(repeats: int) -> dict[str, float]:
    """Everything, each part in processes of its own."""
    found: dict[str, float] = {}
    here = str(Path(__file__).parent)
    importable = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    for part, more in (("--links", {"UCX_TLS": "tcp"}), ("--rdma", {"PYTHONPATH": importable})):
        command = [sys.executable, __file__, part, "--repeats", str(repeats)]
        done = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE, timeout=600, check=True)
        found |= json.loads(done.stdout.decode().strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--links", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rdma", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(Connection(options.serve), options.port)
    if options.links:
        found = links(options.repeats)
    elif options.rdma:
        import bench_links  # by this name the actors' processes find them

        found = asyncio.run(bench_links.rdma_buffer(options.repeats))
    else:
        found = run(options.repeats)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
