"""A trainer rank for the transfer tests: a process of its own that publishes when told to. Not a test.

`python transfer_rank.py <connection's descriptor> <name> <rank>`: receives `(method, args)`, answers `(ok, value)`.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch

from milkweed.transfer import copying
from milkweed.transfer.packing import Packing
from milkweed.transfer.plan import EngineLayout, Parameter, Piece, RankLayout
from milkweed.transfer.publisher import Publisher


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A made-up model of about 54 MB: matrices, odd sizes, vectors, a scalar, three dtypes; equal in all processes."""
    make = torch.Generator().manual_seed(seed)
    shapes = {"embed": (4099, 1024), "q": (1024, 2048), "up": (3000, 1024), "lm_head": (4099, 1024), "norm": (1023,)}
    tensors = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    tensors["half"] = torch.randn(33, 66, generator=make).to(torch.bfloat16)
    tensors["steps"] = torch.tensor(seed)
    return tensors


def shards(tensors: dict[str, torch.Tensor], how: str, rank: int):
    """This rank's pieces: `whole` (one rank has all), `fsdp` (dim 0 over two ranks, uneven), `tp` (columns or rows)."""
    for name, tensor in tensors.items():
        dim = 1 if how == "tp" and name in ("q", "half") else 0
        if how == "whole" or tensor.ndim == 0 or (how == "tp" and tensor.ndim == 1):
            if rank == 0:
                yield name, tensor, tuple(tensor.shape), (0,) * tensor.ndim
            continue
        sizes = [len(part) for part in torch.arange(tensor.shape[dim]).chunk(2)]
        start = sum(sizes[:rank])
        offsets = tuple(start if d == dim else 0 for d in range(tensor.ndim))
        yield name, tensor.narrow(dim, start, sizes[rank]), tuple(tensor.shape), offsets


PACKED = {"a": (2048, 1024), "b": (2048, 1024), "c": (4096, 1024)}


def layout() -> EngineLayout:
    """One engine rank with the tensors of PACKED (32 MB) one after another."""
    parameters, at = [], 0
    for name, shape in PACKED.items():
        parameters.append(Parameter(name, "float32", shape, at, shape[0] * shape[1] * 4))
        at += parameters[-1].nbytes
    pieces = [Piece(n, (0, 0), s, i, 0, (s[1], 1)) for i, (n, s) in enumerate(PACKED.items())]
    return EngineLayout(dict(PACKED), [RankLayout(parameters, pieces, at)])


def halves(rank: int) -> list[tuple]:
    """The boxes of one of two ranks: half of the rows of everything."""
    return [(n, (rank * s[0] // 2, 0), (s[0] // 2, s[1])) for n, s in PACKED.items()]


def packed_values(seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=make) for n, s in PACKED.items()}


class Rank:
    def __init__(self, name: str, rank: int) -> None:
        self.rank, self.publisher = rank, Publisher(name, rank, chunk_bytes=4 << 20)
        self.packing = Packing(layout(), halves(rank))

    def publish_packed(self, version, readers=(), ttl_s=60.0):
        values = packed_values(version.step)
        parts = [values[n][o[0] : o[0] + s[0]] for n, o, s in halves(self.rank)]
        return self.publisher.publish_packed(version, self.packing, parts, readers, ttl_s)

    def die_while_publishing(self, version, jobs):
        """Killed when so many copies are done."""
        move, left = ctypes.memmove, [jobs]

        def counted(*job):
            move(*job)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        copying.ctypes = SimpleNamespace(memmove=counted)
        self.publish_packed(version)

    def publish(self, version, how, readers=(), ttl_s=60.0, dtype=None):
        pieces = shards(weights(version.step), how, self.rank)
        return self.publisher.publish(version, pieces, readers, ttl_s, dtype)

    def publish_forever(self, version, seconds):
        """Overwrite the slots again and again from another thread."""

        def scribble():
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.publisher._plane.arena.bytes[:] += 1

        threading.Thread(target=scribble, daemon=True).start()

    def cpu(self, seconds):
        began = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - began) / seconds

    def __getattr__(self, name):
        return getattr(self.publisher, name)


def main() -> None:
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    rank = Rank(sys.argv[2], int(sys.argv[3]))
    connection.send((True, "ready"))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:  # the test is over
            return
        try:
            connection.send((True, getattr(rank, method)(*args)))
        except Exception as error:
            connection.send((False, error))


if __name__ == "__main__":
    main()
