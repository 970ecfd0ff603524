"""Strikes on a live run: its processes are killed, stopped and made to crash, and worse; it has to go on as if nothing had been."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strike_blows import fill_disk, flip_checkpoint, flip_weights, raise_in_reward, slow_down
from strike_model import WINDOWS, Tally

from milkweed.data.ledger import audit
from milkweed.fleet import processes

ROLES = ("rollout", "trainer", "reward", "puller")
KINDS = tuple(f"{how} {role}" for how in ("kill", "stop", "crash") for role in ROLES) + (
    "kill host", "slow rollout", "raise reward", "flip rollout", "flip checkpoint", "full disk",
)  # fmt: skip
CONTROLLER = ("kill controller", "flip checkpoint", *WINDOWS)
"""What ends the controller."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGABRT}
STUCK_S = 150.0
"""Longest time in which a struck run may train no step: start-up of the whole mesh on two busy cores, and then some."""
GONE_S = 6.0


def _heeds_interrupts() -> None:
    """A background job of a shell ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Struck:
    """One run directory and the controller that works on it."""

    def __init__(self, folder: Path, command: list[str], say: Callable[[str], None], log: Path) -> None:
        self.folder, self.command, self.say, self.log = folder, command, say, log
        self.controller: subprocess.Popen[bytes] | None = None
        self.tokens: set[str] = set()
        self.small = False
        """Whether it has a disk of its own, that can be filled."""

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.controller = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_heeds_interrupts)

    def steps(self) -> int:
        """Steps written down so far, in all lives."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return sum('"loss"' in line for line in lines)

    def step(self) -> int:
        """The last step written down."""
        found = 0
        for line in (self.folder / "metrics.jsonl").read_text().splitlines() if (self.folder / "metrics.jsonl").exists() else ():
            if line.endswith("}"):
                found = json.loads(line).get("step", found)
        return found

    def faults(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.folder / "faults.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def of_role(self, role: str) -> list[int]:
        """Processes of a role, children of replicas too."""
        assert self.controller is not None
        table = processes.everyone()
        found = []
        for pid in table:
            above: int | None = pid
            while above in table and above != self.controller.pid:
                above = table[above].parent
            env = processes.environment(pid) if above == self.controller.pid else {}
            if processes.TOKEN_VAR in env:
                self.tokens.add(env[processes.TOKEN_VAR])
            replica = env.get(processes.REPLICA_VAR, "host" if processes.HOST_VAR in env else "controller")
            if replica.startswith(role):
                found.append(pid)
        return found

    def progress(self, steps: int = 2, within_s: float = STUCK_S) -> bool:
        """Waits until `steps` more steps are trained; False where the run ends or none comes in time."""
        assert self.controller is not None
        count, end = self.steps(), time.monotonic() + within_s
        while self.steps() < count + steps:
            if time.monotonic() > end or self.controller.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def interrupt(self, within_s: float) -> bool:
        """As Ctrl-C does; whether the controller has ended in time."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGINT)
        try:
            self.controller.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """The controller is killed if it lives still, with its process group; its keepers end the rest."""
        if self.controller is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.controller.pid, signal.SIGKILL)
        self.controller.wait(10)
        end = time.monotonic() + GONE_S
        while self.orphans() and time.monotonic() < end:
            time.sleep(0.2)

    def orphans(self) -> list[int]:
        return [pid for token in self.tokens for pid in processes.by_token(token)]


def strike_real(count: int, seed: int, run: Struck, tally: Tally, kinds: list[str] | None = None, *, first: int = 1, until: float = math.inf) -> Tally:
    """`count` strikes, of all kinds and windows in an order of `seed`, from the `first` of them on; none begins after `until`
    (time.monotonic). The run is started, and at the end interrupted; whatever happens here, none of it is left."""
    dice = random.Random(seed)
    if kinds is None:
        every = [k for k in (*KINDS, "kill controller", *WINDOWS) if run.small or k != "full disk"]
        kinds = [every[i % len(every)] for i in range(count)]
        dice.shuffle(kinds)
    if "full disk" in kinds and not run.small:
        raise SystemExit("full disk: the run has no disk of its own, and this machine's is not filled")
    run.start()
    try:
        if not run.progress(3):
            raise SystemExit(f"the run does not start; see {run.log}")
        for number, kind in list(enumerate(kinds, 1))[first - 1 :]:
            if time.monotonic() > until:
                run.say(f"the time is over before strike {number}; go on from it with --first {number}")
                break
            if not _strike(run, number, kind, dice, tally):
                break
        run.of_role("")
        tally.hangs += not run.interrupt(60)
    finally:
        run.end()
    tally.orphans += len(run.orphans())
    tally.problems += audit(run.folder).problems
    tally.steps = run.step()
    return tally


def _strike(run: Struck, number: int, kind: str, dice: random.Random, tally: Tally) -> bool:
    """One strike and what became of it; False where the run did not survive it."""
    began, known = time.monotonic(), len(run.faults())
    run.of_role("")  # its token, should it be killed
    assert run.controller is not None
    if kind == "flip checkpoint":
        end = began + STUCK_S
        while not (flipped := flip_checkpoint(run.folder, dice)) and time.monotonic() < end:
            time.sleep(0.2)  # a young run has no two yet
        if not flipped:
            tally.problems.append(f"strike {number}, {kind}: there are no two checkpoints")
            return True
    if kind in CONTROLLER:
        _kill_controller(run, kind, tally)
    elif kind == "full disk":
        fill_disk(run.folder)
    elif kind == "raise reward":
        raise_in_reward(run.folder)
    elif kind in ("slow rollout", "flip rollout"):
        pids = _one_engine(run, dice)
        if kind == "slow rollout":
            slow_down(pids)
        elif not any(flip_weights(token, pids, dice) for token in run.tokens):
            tally.problems.append(f"strike {number}, {kind}: no weights were found in {pids}")
            return True
        _until_mended(run, known)
        found = [f["kind"] for f in run.faults()[known:] if f["what"] == "failed"]
        if kind == "slow rollout" and "slow" not in found:
            tally.problems.append(f"strike {number}, {kind}: it was not found to be slow, but {found or 'nothing'}")
        if kind == "flip rollout" and not found:
            run.say(f"strike {number} {kind}: nobody looked before the next version was written over it")
    else:
        how, role = kind.split()
        pids = run.of_role(role)
        if not pids:
            tally.problems.append(f"strike {number}, {kind}: the run has no such process")
            return True
        os.kill(dice.choice(pids), SIGNALS[how])
        _until_mended(run, known)
    if not run.progress():
        tally.hangs += 1
        tally.problems.append(f"strike {number}, {kind}: no step was trained after it; controller's status {run.controller.poll()}")
        return False
    tally.strikes += 1
    tally.hit[kind] = tally.hit.get(kind, 0) + 1
    took = time.monotonic() - began
    tally.recover_s.append(round(took, 2))
    report = audit(run.folder)
    tally.lost += abs(report.issued - report.trained - sum(report.dropped.values()) - report.held)
    tally.over_bound += report.max_lag > 1
    tally.problems += [f"strike {number}, {kind}: {p}" for p in report.problems]
    mended = [f"{f['replica']} {f['after_s']:.1f} s" for f in run.faults()[known:] if f["what"] == "replaced"]
    run.say(f"strike {number} {kind}: two steps later after {took:.1f} s" + (f" ({', '.join(mended)})" if mended else ""))
    return True


def _one_engine(run: Struck, dice: random.Random) -> list[int]:
    """All processes of one of the engines."""
    names: dict[str, list[int]] = {}
    for pid in run.of_role("rollout"):
        names.setdefault(processes.environment(pid)[processes.REPLICA_VAR], []).append(pid)
    return names[dice.choice(sorted(names))]


def _kill_controller(run: Struck, kind: str, tally: Tally) -> None:
    assert run.controller is not None
    if kind in WINDOWS:
        (run.folder / "window").write_text(kind)
        try:
            run.controller.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            tally.problems.append(f"the window {kind} was not reached")
            run.controller.kill()
    else:
        run.controller.kill()
    run.controller.wait(10)
    time.sleep(GONE_S)
    if left := run.orphans():
        tally.orphans += len(left)
        tally.problems.append(f"{kind}: {len(left)} processes outlived the controller by {GONE_S:g} s")
    run.start()


def _until_mended(run: Struck, known: int) -> None:
    """Waits until what the strike broke is whole again; a strike that broke nothing (a child that is replaced by its own
    parent, say) is over after 12 s."""
    end, last = time.monotonic() + 12.0, time.monotonic() + STUCK_S
    while time.monotonic() < min(end, last):
        time.sleep(0.2)
        new = run.faults()[known:]
        failed = [f for f in new if f["what"] == "failed"]
        if failed:
            end = max(end, time.monotonic() + 1.0) if len([f for f in new if f["what"] != "failed"]) < 1 else 0.0
            if run.controller is not None and run.controller.poll() is not None:
                return


def command(folder: Path, model: Path, mesh: str) -> list[str]:
    recipe = Path(__file__).with_name("struck.py")
    return [sys.executable, str(recipe), "--model", str(model), "--run-dir", str(folder), "--mesh", mesh]
