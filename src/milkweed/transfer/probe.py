"""Measures the plane's own bandwidth, for `milkweed doctor` and the start-up log: NIXL READ against memcpy.

`measure` starts one process that reads from another, as a puller reads from a trainer rank, so that neither NIXL nor
its memory stays in the caller. A transport that silently fell back to something slow is seen here, before a run pays
for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec

from milkweed.errors import TransferError

NBYTES = 64 << 20
REPEATS = 5
FLOOR = 0.4
"""Of memcpy: NIXL between processes of one host reaches 0.7 and more, over TCP about 0.3."""


class Probe(msgspec.Struct, kw_only=True):
    """What was measured: GB/s are the best of several reads of `nbytes`, since other work on the host only slows.

    `readv_gb_s` is a raw `process_vm_readv`, None where the kernel refuses it; NIXL's fast way on one host uses the
    same call. `shm_gb_s` is a copy into a file of /dev/shm, which is how weights reach engines on the trainer's own host;
    None where there is no room. `warnings` hold one line for each thing that is wrong, with its mend.
    """

    nixl: str
    plugins: list[str]
    backends: list[str]
    nbytes: int
    memcpy_gb_s: float
    readv_gb_s: float | None
    nixl_gb_s: float
    shm_gb_s: float | None = None
    warnings: list[str] = []

    @property
    def ratio(self) -> float:
        """NIXL's speed over memcpy's."""
        return self.nixl_gb_s / self.memcpy_gb_s

    @property
    def ways(self) -> str:
        """How weights travel with `transfer.transport = "auto"`, in order of choice."""
        first = "" if self.shm_gb_s is None else f"shared memory on the trainer's host ({self.shm_gb_s:.1f} GB/s), "
        return f"{first}NIXL over {', '.join(self.backends)} ({self.nixl_gb_s:.1f} GB/s), messages where neither connects"

    @property
    def line(self) -> str:
        """One line for the log."""
        readv = "refused" if self.readv_gb_s is None else f"{self.readv_gb_s:.1f}"
        return (
            f"NIXL {self.nixl} ({', '.join(self.backends)}): READ {self.nixl_gb_s:.1f} GB/s, {self.ratio:.2f} of "
            f"memcpy ({self.memcpy_gb_s:.1f}); process_vm_readv {readv}"
        )


def measure(nbytes: int = NBYTES, repeats: int = REPEATS, deadline_s: float = 60.0) -> Probe:
    """Measure on this host in two processes that are gone afterwards.

    Raises TransferError if NIXL is missing, does not start, or does not answer within the deadline.
    """
    command = [sys.executable, "-m", "milkweed.transfer.probe", "read", str(nbytes), str(repeats), str(deadline_s)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        try:
            out, err = reader.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired as error:
            raise TransferError(f"the NIXL probe did not end within {deadline_s:g} s: its transport hangs") from error
        finally:
            if reader.poll() is None:
                reader.kill()
    last = out.decode(errors="replace").strip().rsplit("\n", 1)[-1]
    if reader.returncode != 0:
        raise TransferError(f"the NIXL probe failed: {err.decode(errors='replace').strip()[-800:]}")
    return msgspec.json.decode(last, type=Probe)


def judge(probe: Probe, floor: float = FLOOR) -> list[str]:
    """What is wrong with the measured speeds, each line with its mend."""
    found = []
    if probe.readv_gb_s is None:
        found.append(
            "the kernel refuses process_vm_readv between this user's processes, so NIXL falls back to TCP on one host: "
            "set kernel.yama.ptrace_scope=0 (docker: --cap-add=SYS_PTRACE)"
        )
    if probe.ratio < floor:
        mend = "unset UCX_TLS" if os.environ.get("UCX_TLS") else "UCX_LOG_LEVEL=info shows the transport in use"
        found.append(
            f"NIXL reads at {probe.nixl_gb_s:.2f} GB/s, {probe.ratio:.2f} of memcpy, below the floor of {floor:g}: {mend}"
        )
    if probe.shm_gb_s is None:
        found.append(
            f"/dev/shm has no room for {probe.nbytes} bytes, so engines cannot be given weights: enlarge it (docker: "
            "--shm-size)"
        )
    elif probe.shm_gb_s < floor * probe.memcpy_gb_s:
        found.append(
            f"copies into /dev/shm reach {probe.shm_gb_s:.2f} GB/s, below {floor:g} of memcpy ({probe.memcpy_gb_s:.2f}): "
            "is memory swapped, or limited by the container?"
        )
    return found


def _shared(source: int, nbytes: int, repeats: int) -> float | None:
    """GB/s of copies into a file of /dev/shm, whose pages are there already; None where there is no room."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="mw-probe-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:  # the probe says so
            return None
        there = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return _best(lambda: ctypes.memmove(there, source, nbytes), nbytes, repeats)


def _best(work: Callable[[], object], nbytes: int, repeats: int) -> float:
    """GB/s of the fastest of `repeats` runs, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds[1:]) / 1e9


def _serve(nbytes: int) -> None:
    """The other process: offer an arena until stdin ends, which it does when the reading process is gone."""
    from milkweed.transfer.arena import Arena
    from milkweed.transfer.nixl import Agent

    arena, agent = Arena(nbytes), Agent("probe-source", progress=True)
    agent.register(arena)
    offer = {"agent": agent.name, "metadata": agent.metadata.hex(), "address": arena.address}
    print(msgspec.json.encode(offer).decode(), flush=True)
    sys.stdin.read()


def _read(nbytes: int, repeats: int, deadline_s: float) -> Probe:
    """Measure, in the reading process."""
    command = [sys.executable, "-m", "milkweed.transfer.probe", "serve", str(nbytes)]
    # before NIXL starts here: nothing may be forked once UCX is up
    source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        return _measure(source, nbytes, repeats, time.monotonic() + deadline_s)
    finally:
        source.kill()
        source.wait()


def _measure(source: subprocess.Popen[bytes], nbytes: int, repeats: int, deadline: float) -> Probe:
    from milkweed.transfer.arena import Arena
    from milkweed.transfer.nixl import Agent, installed_version

    here, other = Arena(nbytes), Arena(nbytes)
    agent = Agent("probe", progress=False)
    agent.register(here)
    offer = _offer(source)
    agent.add_peer(offer["agent"], bytes.fromhex(offer["metadata"]))
    chunk = 16 << 20
    pieces = [(start, min(chunk, nbytes - start)) for start in range(0, nbytes, chunk)]
    reads = agent.prepare_reads(here.address, offer["agent"], offer["address"], pieces)

    def read() -> None:
        for one in reads:
            done = one.start()
            while not done:
                if time.monotonic() > deadline:
                    raise TransferError("a NIXL READ between two processes of this host does not end")
                done = one.done()

    nixl_gb_s = _best(read, nbytes, repeats)
    memcpy_gb_s = _best(lambda: ctypes.memmove(here.address, other.address, nbytes), nbytes, repeats)
    readv = readv_function()
    try:
        readv_gb_s = _best(lambda: readv(source.pid, here.address, offer["address"], nbytes), nbytes, repeats)
    except OSError:  # refused by the kernel: the probe says so
        readv_gb_s = None
    probe = Probe(
        nixl=installed_version() or "?", plugins=agent.plugins, backends=agent.backends, nbytes=nbytes,
        memcpy_gb_s=memcpy_gb_s, readv_gb_s=readv_gb_s, nixl_gb_s=nixl_gb_s,
        shm_gb_s=_shared(other.address, nbytes, repeats),
    )  # fmt: skip
    probe.warnings = judge(probe)
    return probe


def _offer(source: subprocess.Popen[bytes]) -> dict:
    """The serving process's one line; UCX may print others on its stdout."""
    assert source.stdout is not None
    for line in source.stdout:
        if line.startswith(b"{"):
            return msgspec.json.decode(line)
    raise TransferError("the serving half of the NIXL probe ended before it offered anything")


class _Span(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def readv_function() -> Callable[[int, int, int, int], None]:
    """`process_vm_readv(pid, to, from, nbytes)`: the kernel's own copy between processes, the measure of NIXL's.

    What it returns raises OSError if the kernel refuses, or the other process is gone.
    """
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    one = ctypes.c_ulong(1)

    def read(pid: int, here: int, there: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            to, source = _Span(here + done, nbytes - done), _Span(there + done, nbytes - done)
            got = call(pid, ctypes.byref(to), one, ctypes.byref(source), one, ctypes.c_ulong(0))
            if got <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += got

    return read


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]))
    else:
        result = _read(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
        print(msgspec.json.encode(result).decode(), flush=True)
