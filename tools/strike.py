"""Seeded strikes on a run: processes killed, stopped, crashed, slowed, bytes flipped, a full disk, a reward that
raises, the controller killed at named moments.

    ./tools/run tools/strike.py --count 10                     # a tiny real run on this machine, in a temporary folder
    ./tools/run tools/strike.py --simulated --count 1000       # the loop, router, supervisor and ledger on virtual time
    ./tools/run tools/strike.py --count 5 --seed 3 --json      # last line: one JSON object

The audit is made after every strike. Everything in the last line but `strikes`, `steps`, `hit` and `recover_s` has to be 0.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from pathlib import Path

from strike_blows import small_disk
from strike_model import KINDS, WINDOWS, Scene, Tally, simulate_strikes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="on virtual time")
    parser.add_argument("--kinds", default="", help="real strikes of these kinds only, in this order, separated by commas")
    parser.add_argument("--folder", type=Path, help="keep the run here (default: a temporary folder)")
    parser.add_argument("--mesh", default="", help="mesh file of the real run (default: two engines on this machine)")
    parser.add_argument("--first", type=int, default=1, help="real strikes: go on from this one of the order (with --folder)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="real strikes: begin none after so many minutes")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    tally = Tally()
    for number in (signal.SIGTERM, signal.SIGHUP):  # what is struck is ended then too, as with Ctrl-C
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or Path(temporary)
        if a.simulated:
            tally = simulate_strikes(a.count, a.seed, folder, Scene())
            kinds = [*KINDS, *WINDOWS]
        else:
            tally, kinds = real(a, folder, tally)
    missed = [k for k in WINDOWS if k not in tally.hit]
    for problem in tally.problems[:20]:
        print(problem)
    print("windows hit: " + ", ".join(f"{w} {tally.hit.get(w, 0)}" for w in WINDOWS) + (f"; never: {', '.join(missed)}" if missed else ""))
    print("kinds: " + ", ".join(f"{k} {tally.hit[k]}" for k in kinds if k in tally.hit))
    bad = tally.lost + tally.doubled + tally.over_bound + tally.hangs + tally.orphans + len(tally.problems)
    times = sorted(tally.recover_s)
    recover = {"median": times[len(times) // 2], "max": times[-1]} if times else {}
    last = {
        "strikes": tally.strikes, "lost": tally.lost, "doubled": tally.doubled, "over_bound": tally.over_bound, "hangs": tally.hangs,
        "orphans": tally.orphans, "problems": len(tally.problems), "recover_s": recover, "steps": tally.steps, "hit": tally.hit,
    }  # fmt: skip
    print(json.dumps(last) if a.json else f"{tally.strikes} strikes over {tally.steps} steps, {bad} faults; recovered in {recover}")
    return 1 if bad else 0


def real(a: argparse.Namespace, folder: Path, tally: Tally) -> tuple[Tally, list[str]]:
    from strike_real import KINDS as REAL
    from strike_real import Struck, command, strike_real

    import milkweed as mw

    model = folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    if not model.is_dir():
        mw.new_qwen3(model, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128)
    mesh = a.mesh
    if not mesh:
        mesh = str(folder / "struck.toml")
        Path(mesh).write_text('name = "struck"\n[rollout]\nreplicas = 2\nlook_s = 5\n[rollout.engine]\nmax_running_requests = 64\n[faults]\nretries = 20\nrole_retries = 40\nhost_retries = 40\nmost_s = 1\n')
    kinds = [k.strip() for k in a.kinds.split(",") if k.strip()] or None
    unknown = set(kinds or ()) - {*REAL, "kill controller", *WINDOWS}
    if unknown:
        raise SystemExit(f"--kinds: {', '.join(sorted(unknown))} is none of {', '.join([*REAL, 'kill controller', *WINDOWS])}")
    with small_disk(folder) as disk:
        if disk is None:
            print("no disk of its own could be mounted for the run (it takes root), so none is filled")
        where = disk or folder / "run"
        run = Struck(where, command(where, model, mesh), lambda text: print(text, flush=True), folder / "run.log")
        run.small = disk is not None
        strike_real(a.count, a.seed, run, tally, kinds, first=a.first, until=time.monotonic() + a.minutes * 60)
    return tally, [*REAL, "kill controller", *WINDOWS]


if __name__ == "__main__":
    sys.exit(main())
