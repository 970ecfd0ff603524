#!/usr/bin/env python3
"""NIXL alone, writing pages of KV from one process into another: what `bench_kv.py` measures engines against.

Memory and descriptors are those of an engine: `buffers` arrays (keys and values of each layer) of `pages` pages, all described
beforehand; for each transfer the pages of a prompt are chosen in every array, posted as one write and waited for.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import time

import numpy as np

from milkweed.errors import TransferError
from milkweed.transfer.arena import Arena
from milkweed.transfer.nixl import Agent

DEADLINE_S = 60.0


def described(base: int, buffers: int, pages: int, page_bytes: int) -> np.ndarray:
    """Every page as (address, bytes, device)."""
    table = np.zeros((buffers * pages, 3), np.uint64)
    table[:, 0] = base + np.arange(buffers * pages, dtype=np.uint64) * np.uint64(page_bytes)
    table[:, 1] = page_bytes
    return table


class Raw:
    """The writing side, in this process; the other is a process of its own. Raises TransferError where NIXL fails."""

    def __init__(self, buffers: int, *, pages: int, page_bytes: int) -> None:
        self._buffers, self._pages = buffers, pages
        command = [sys.executable, __file__, str(buffers * pages * page_bytes)]
        self._peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._peer.stdout is not None
        there = json.loads(self._peer.stdout.readline())
        self._arena, self._agent = Arena(buffers * pages * page_bytes), Agent("kv-raw", progress=True)
        self._agent.register(self._arena)
        self._agent.add_peer(there["name"], base64.b64decode(there["metadata"]))
        nixl = self._agent._agent
        self._ours = nixl.prep_xfer_dlist("", described(self._arena.address, buffers, pages, page_bytes), "DRAM")
        self._theirs = nixl.prep_xfer_dlist(there["name"], described(there["address"], buffers, pages, page_bytes), "DRAM")

    def write(self, count: int) -> float:
        """Writes `count` pages of every array; returns the seconds from choosing them until they are there."""
        nixl, ends = self._agent._agent, time.monotonic() + DEADLINE_S
        sources, targets = (np.arange(count) + random.randrange(self._pages - count) for _ in range(2))
        began = time.perf_counter()
        each = (np.arange(self._buffers) * self._pages)[:, None]
        ours, theirs = ((each + some).ravel().astype(np.int32) for some in (sources, targets))
        handle = nixl.make_prepped_xfer("WRITE", self._ours, ours, self._theirs, theirs)
        state = nixl.transfer(handle)
        while state not in ("DONE", "ERR"):
            if time.monotonic() > ends:
                raise TransferError(f"{count} pages were not written within {DEADLINE_S:g} s")
            time.sleep(0)
            state = nixl.check_xfer_state(handle)
        if state == "ERR":
            raise TransferError("NIXL WRITE failed: state ERR")
        return time.perf_counter() - began

    def close(self) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.wait(10)
        del self._ours, self._theirs
        self._agent.close()


def serve(nbytes: int) -> None:
    """The side that is written into, until its standard input ends."""
    arena, agent = Arena(nbytes), Agent("kv-raw-target", progress=True)
    agent.register(arena)
    said = {"name": agent.name, "address": arena.address, "metadata": base64.b64encode(agent.metadata).decode()}
    print(json.dumps(said), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
