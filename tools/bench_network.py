#!/usr/bin/env python3
"""The plane between hosts that share nothing: network namespaces joined by a bridge. Part of bench_transfer.py.

    tools/bench_network.py [--mb 100] [--repeats 3]

Needs root and `ip`. One namespace publishes; the pullers of two others read from it, or the second from the first
(relay). NIXL is on TCP. Ends with one line of JSON: `network_gb_s` (one reader), `network_two_s` and `network_relay_s`
(until both readers have it), and `egress_two`, `egress_relay`: what left the publisher, in times of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 120.0
ROWS = 1024


def packing(mb: int) -> Any:
    from milkweed.transfer.packing import Packing
    from milkweed.transfer.plan import EngineLayout, Parameter, Piece, RankLayout

    count, nbytes = max(1, mb * 1_000_000 // (4 * ROWS * ROWS)), 4 * ROWS * ROWS
    shapes = {f"w{i:04d}": (ROWS, ROWS) for i in range(count)}
    parameters = [Parameter(n, "float32", s, i * nbytes, nbytes) for i, (n, s) in enumerate(shapes.items())]
    pieces = [Piece(n, (0, 0), s, i, 0, (ROWS, 1)) for i, (n, s) in enumerate(shapes.items())]
    layout = EngineLayout(shapes, [RankLayout(parameters, pieces, count * nbytes)])
    return Packing(layout, [(n, (0, 0), s) for n, s in shapes.items()])


class Publishing:
    """The publishing host."""

    def __init__(self, mb: int) -> None:
        import torch

        from milkweed.transfer.publisher import Publisher

        self.packing = packing(mb)
        self.tensors = [torch.randn(ROWS, ROWS) for _ in self.packing.boxes]
        self.publisher = Publisher("bench")

    def publish(self, step: int) -> Any:
        from milkweed.types import PolicyVersion

        for tensor in self.tensors:
            tensor[::64] += 1  # every chunk is new
        return self.publisher.publish_packed(PolicyVersion(0, step), self.packing, self.tensors, [])

    def sent(self) -> int:
        """Bytes that have left this host."""
        with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
            return int(file.read())


class Pulling:
    """A reading host."""

    def __init__(self, mb: int) -> None:
        from milkweed.transfer.puller import Puller

        self.puller = Puller(f"bench{uuid.uuid4().hex[:6]}")

    def pull(self, share: Any) -> float:
        from milkweed.transfer.manifest import join

        asyncio.run(self.puller.pull(join([share]), ANSWER_S, ["engine"]))
        self.puller.keep_only({"engine": share.version})
        return self.puller.status()["last"]["read_s"]

    def offer(self, version: Any) -> Any:
        share = self.puller.offer(version, "relay")
        self.puller.release("relay")
        return share

    def close(self) -> None:
        self.puller.close()


def serve(connection: Connection, role: str, mb: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.system("mount -t sysfs none /sys 2>/dev/null")  # of this namespace's own interfaces
    host = Publishing(mb) if role == "publish" else Pulling(mb)
    connection.send("ready")
    while True:
        try:
            method, *args = connection.recv()
        except EOFError:
            return
        connection.send(getattr(host, method)(*args))


def answer(connection: Connection) -> Any:
    if not connection.poll(ANSWER_S):
        raise TimeoutError(f"a host of the benchmark did not answer within {ANSWER_S:g} s")
    return connection.recv()


def ask(connection: Connection, *what: Any) -> Any:
    connection.send(what)
    return answer(connection)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Names of network namespaces that reach each other over one bridge; gone afterwards."""
    tag = uuid.uuid4().hex[:5]
    bridge, names = f"mwb{tag}", [f"mw{tag}{i}" for i in range(count)]
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"mwv{tag}{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"mwv{tag}{i}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        ip("link", "del", bridge)


def run(mb: int, repeats: int) -> dict[str, float]:
    """Medians of the repeats, the two ways in turn."""
    rounds: dict[str, list[float]] = {}
    with hosts(3) as names:
        processes, links = [], []
        try:
            for name, role in zip(names, ("publish", "pull", "pull"), strict=True):
                ours, theirs = Pipe()
                command = ["ip", "netns", "exec", name, sys.executable, __file__, "--serve", str(theirs.fileno())]
                command += ["--role", role, "--mb", str(mb)]
                env = os.environ | {"UCX_TLS": "tcp"}
                processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env))
                links.append(ours)
                theirs.close()
            for link in links:
                answer(link)
            publisher, *readers = links
            for count in range(repeats + 2):  # both slots of everything are warm then
                for relay in (False, True):
                    share = ask(publisher, "publish", 2 * count + relay + 1)
                    before, began = ask(publisher, "sent"), time.perf_counter()
                    if relay:
                        ask(readers[0], "pull", share)
                        ask(readers[1], "pull", ask(readers[0], "offer", share.version))
                    else:
                        for reader in readers:
                            reader.send(("pull", share))
                        for reader in readers:
                            answer(reader)
                    seconds, way = time.perf_counter() - began, "relay" if relay else "two"
                    if count > 1:
                        rounds.setdefault(f"network_{way}_s", []).append(seconds)
                        rounds.setdefault(f"egress_{way}", []).append((ask(publisher, "sent") - before) / share.nbytes)
                share = ask(publisher, "publish", 2 * (repeats + 2) + count + 1)
                rounds.setdefault("network_gb_s", []).append(share.nbytes / ask(readers[0], "pull", share) / 1e9)
            for reader in readers:
                ask(reader, "close")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return {name: statistics.median(values) for name, values in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(Connection(options.serve), options.role, options.mb)
    print(json.dumps(run(options.mb, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
