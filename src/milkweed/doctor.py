"""`milkweed doctor`: what this machine and its packages are, and for each thing wrong one line how to mend it.

Imports nothing heavy: what has to import the stack runs in a child process with a deadline.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

OK, NOTE, WRONG = "ok", "note", "WRONG"
_GIB = 1 << 30


class Finding(NamedTuple):
    """One line of the report. `state` is OK, NOTE (works, but less well) or WRONG; `mend` says what to do about it."""

    name: str
    value: str
    state: str = OK
    mend: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns 0 if nothing is wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="milkweed doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--quick", action="store_true", help="leave out what takes seconds: imports and bandwidth")
    options = parser.parse_args(argv)
    lane = detect_lane()
    findings: list[Finding] = []
    for check in [*CHECKS, *([] if options.quick else SLOW_CHECKS)]:
        for finding in check(lane):
            findings.append(finding)
            if not options.json:
                print(f"{finding.state:5}  {finding.name:16} {finding.value}", flush=True)
                if finding.mend:
                    print(f"{'':5}  {'':16} -> {finding.mend}", flush=True)
    wrong = sum(f.state == WRONG for f in findings)
    if options.json:
        print(json.dumps({"lane": lane, "wrong": wrong, "findings": [f._asdict() for f in findings]}))
    else:
        print(f"\n{wrong} of {len(findings)} things are wrong" if wrong else "\nnothing is wrong")
    return 1 if wrong else 0


# -- what is asked of the machine ------------------------------------------------------------------------------------


def _ask(*command: str, deadline_s: float = 20.0) -> str | None:
    """What a command prints, or None if it is not there, fails or passes its deadline."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect_lane() -> str:
    """`gpu` where an NVIDIA driver answers, else `cpu`, unless MILKWEED_LANE decides, as in tools/environment."""
    chosen = os.environ.get("MILKWEED_LANE")
    if chosen in ("cpu", "gpu"):
        return chosen
    return "gpu" if "GPU" in (_ask("nvidia-smi", "-L") or "") else "cpu"


def lock_folder() -> Path | None:
    """Where the locked versions are: in a checkout, or inside an installed wheel."""
    here = Path(__file__).resolve().parent
    for folder in (here.parents[1] / "tools" / "lock", here / "lock"):
        if (folder / "cpu.txt").exists():
            return folder
    return None


def locked(lane: str) -> dict[str, str]:
    """Name (normalised) -> version of every package of a lane; empty if the lock is not at hand."""
    folder = lock_folder()
    if folder is None:
        return {}
    files = ["cpu.txt", "cpu-no-deps.txt"] if lane == "cpu" else ["gpu.txt"]
    pins = {}
    for file in files:
        for line in (folder / file).read_text().splitlines():
            name, separator, version = line.partition("==")
            if separator and not line.startswith("#"):
                pins[normal(name)] = version.strip()
    return pins


def normal(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower().strip()


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# -- the checks ------------------------------------------------------------------------------------------------------


def python_and_lane(lane: str) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        yield Finding("python", f"{version} ({sys.prefix})")
    else:
        yield Finding(
            "python", version, NOTE, "the locked versions were tried on Python 3.11; make .venv with python3.11"
        )
    machine = f"{platform.system()} {platform.machine()}"
    if machine == "Linux x86_64":
        yield Finding("lane", f"{lane}, {machine}")
    else:
        yield Finding(
            "lane",
            f"{lane}, {machine}",
            WRONG,
            "torchmonarch and nixl are built for Linux x86_64 only: use such a machine",
        )


def versions(lane: str) -> Iterator[Finding]:
    pins = locked(lane)
    if not pins:
        yield Finding(
            "versions", "the lock is not here", NOTE, "run from a checkout, or install a wheel that carries it"
        )
        return
    off = [(name, pin, _installed(name)) for name, pin in pins.items()]
    off = [(name, pin, have) for name, pin, have in off if have != pin]
    yield Finding("versions", f"{len(pins) - len(off)} of {len(pins)} packages as locked", WRONG if off else OK)
    for name, pin, have in off[:10]:
        yield Finding(name, f"{have or 'absent'}, locked {pin}", WRONG, f"pip install --no-deps {name}=={pin}")
    if len(off) > 10:
        mend = "`./tools/test --setup-only` installs what is locked"
        yield Finding("...", f"and {len(off) - 10} more", WRONG, mend)


def torch_build(lane: str) -> Iterator[Finding]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        yield Finding("torch build", "torch is not installed", WRONG, "`./tools/test --setup-only`")
        return
    text = _read(str(Path(spec.origin).parent / "version.py"))
    found = re.search(r"^cuda[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    build = f"CUDA {found.group(1)}" if found else "CPU"
    if (build == "CPU") == (lane == "cpu"):
        yield Finding("torch build", build)
    elif lane == "cpu":
        pin = locked("cpu").get("torch", "2.13.0+cpu")
        mend = (
            f"pip install --no-deps torch=={pin}, with pip's find-links or extra-index-url naming a place that has it"
        )
        yield Finding("torch build", f"{build}, but no NVIDIA driver answers", WRONG, mend)
    else:
        mend = "remove .venv and repeat ./tools/test --setup-only: it makes the GPU lane"
        yield Finding("torch build", f"{build}, but this machine has an NVIDIA GPU", WRONG, mend)


def sglang_cpu(lane: str) -> Iterator[Finding]:
    have = _installed("milkweed-sglang-cpu")
    if lane == "gpu":
        if have:
            mend = "pip uninstall milkweed-sglang-cpu, then reinstall sglang-kernel"
            yield Finding("sglang-cpu", f"{have}, on a machine with a GPU", WRONG, mend)
        return
    if have is None:
        mend = "pip install --no-deps ./tools/sglang-cpu"
        yield Finding("sglang-cpu", "absent: SGLang does not start on a CPU without it", WRONG, mend)
        return
    yield Finding("sglang-cpu", have)
    for reason in importlib.import_module("sglang_cpu.refuse").reasons():
        what, _, mend = reason.partition(": ")
        yield Finding("sglang-cpu", what, WRONG, mend or reason)


def devices(lane: str) -> Iterator[Finding]:
    for line in (
        _ask("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader") or ""
    ).splitlines():
        yield Finding("gpu", line)
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    name = f"{cores} cores, {model.group(1) if model else platform.processor()}, load {load:.1f}"
    if cores < 2:
        yield Finding("cpu", name, NOTE, "trainer and engine share one core: it works at about half the speed")
    elif load > 2 * cores:
        yield Finding("cpu", name, NOTE, "the machine is busy; times will be worse than the README's")
    else:
        yield Finding("cpu", name)


def memory(lane: str) -> Iterator[Finding]:
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    total, free = int(table.get("MemTotal", 0)) << 10, int(table.get("MemAvailable", 0)) << 10
    limit = _read("/sys/fs/cgroup/memory.max")
    value = f"{_gib(free)} free of {_gib(total)}"
    if limit.isdigit():
        value += f", this group may use {_gib(int(limit))}"
        used = _read("/sys/fs/cgroup/memory.current")
        free = min(free, int(limit) - int(used or 0))
    if free < 6 * _GIB:
        yield Finding(
            "memory", value, WRONG, "the default job takes up to 6 GiB: end something, or give the container more"
        )
    else:
        yield Finding("memory", value)
    disk = shutil.disk_usage(Path.cwd())
    low = disk.free < 5 * _GIB
    yield Finding(
        "disk",
        f"{_gib(disk.free)} free in {Path.cwd()}",
        WRONG if low else OK,
        "free some: checkpoints go here" if low else "",
    )


def shared_memory(lane: str) -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        yield Finding("/dev/shm", "absent", WRONG, "mount -t tmpfs tmpfs /dev/shm")
        return
    usage = shutil.disk_usage(place)
    value = f"{_gib(usage.free)} free of {_gib(usage.total)}"
    if usage.free < _GIB:
        mend = "mount -o remount,size=4G /dev/shm, or start the container with --shm-size=4g"
        yield Finding("/dev/shm", value, WRONG, f"weights are handed over there, two copies of the model: {mend}")
    else:
        yield Finding("/dev/shm", value)
    left = [f for f in place.iterdir() if f.name.startswith("mw-")]
    if left:
        size = sum(f.stat().st_size for f in left if f.exists())
        mend = "if no run is alive: rm -r /dev/shm/mw-*"
        yield Finding("/dev/shm/mw-*", f"{len(left)} entries, {_gib(size)}, of runs alive or killed", NOTE, mend)


def limits(lane: str) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < 4096
    yield Finding(
        "open files", f"{soft} (at most {hard})", WRONG if low else OK, f"ulimit -n {min(hard, 65536)}" if low else ""
    )


def sandbox(lane: str) -> Iterator[Finding]:
    """What could confine a reward that runs code it did not write."""
    means = [tool for tool in ("bwrap", "nsjail", "firejail") if shutil.which(tool)]
    if _ask("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true", deadline_s=5) is not None:
        means.append("user namespaces")
    if means:
        yield Finding("sandbox", ", ".join(means))
    else:
        mend = "only for rewards that run model-written code: install bubblewrap, or allow user namespaces"
        yield Finding("sandbox", "none found", NOTE, mend)


def nixl(lane: str) -> Iterator[Finding]:
    try:
        from milkweed.transfer.nixl import Agent, installed_version

        agent = Agent("doctor", progress=False)
        try:
            value = f"{installed_version()}, runs {' '.join(agent.backends)}; plugins {' '.join(agent.plugins)}"
        finally:
            agent.close()
    except Exception as error:  # whatever its native library raises is what the report is for
        pins = locked(lane)
        mend = " ".join(f"{name}=={pins[name]}" for name in ("nixl-cu12", "nixl") if name in pins)
        yield Finding("nixl", str(error), WRONG, f"pip install --no-deps {mend}")
        return
    yield Finding("nixl", value)


def bandwidth(lane: str) -> Iterator[Finding]:
    """What NIXL reaches between two processes of this machine; below its floor it is named, with the mend."""
    from milkweed.errors import TransferError
    from milkweed.transfer.probe import measure

    try:
        probe = measure(deadline_s=90)
    except TransferError as error:
        mend = (
            "unset UCX_TLS and UCX_NET_DEVICES, then `python -m milkweed.transfer.probe read 67108864 5 60` tells more"
        )
        yield Finding("bandwidth", str(error), WRONG, mend)
        return
    yield Finding("bandwidth", probe.line)
    yield Finding("weights", probe.ways)
    for warning in probe.warnings:
        what, _, mend = warning.partition(": ")
        yield Finding("bandwidth", what, NOTE, mend)


_IMPORTS = """
import importlib, json, sys, time
for name in sys.argv[1:]:
    start = time.perf_counter()
    try:
        importlib.import_module(name)
        error = None
    except BaseException as e:
        error = f"{type(e).__name__}: {e}"
    print(json.dumps([name, error, time.perf_counter() - start]), flush=True)
"""


def imports(lane: str) -> Iterator[Finding]:
    """Whether the stack imports, in a fresh process with the environment an engine gets."""
    names = ["torch", "monarch.actor", "torchtitan.models.qwen3", "sglang", "sglang.srt.entrypoints.engine"]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    if lane == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    command = [sys.executable, "-c", _IMPORTS, *names]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=environment, stdin=subprocess.DEVNULL, check=False
        )
        printed, complaint = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        complaint = "no answer within 240 s"
    results = {row[0]: row[1:] for row in map(_row, printed.splitlines()) if row}
    for name in names:
        error, seconds = results.get(name, (complaint.strip().splitlines()[-1:] or ["it ended the process"], 0.0))
        if error is None:
            yield Finding("import", f"{name} in {seconds:.1f} s")
        else:
            yield Finding(
                "import", f"{name}: {error}", WRONG, "mend what stands above first; else `./tools/test --setup-only`"
            )


def _row(line: str) -> list | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # something else printed while it was imported
    return row if isinstance(row, list) and len(row) == 3 else None


CHECKS: list[Callable[[str], Iterator[Finding]]] = [
    python_and_lane, versions, torch_build, sglang_cpu, devices, memory, shared_memory, limits, sandbox, nixl,
]  # fmt: skip
SLOW_CHECKS: list[Callable[[str], Iterator[Finding]]] = [bandwidth, imports]


if __name__ == "__main__":
    sys.exit(main())
