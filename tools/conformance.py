"""Runs the conformance suite against other frameworks and prints who passes what.

    python tools/conformance.py [trl] [verl] [--random 50] [--keep DIR]

Each framework gets an environment of its own (under build/conformance), which sees the packages of this one and adds
the framework without its dependencies' pins, so that nothing here changes. With --random, values and gradients of
random float64 batches are compared with Milkweed's to 1e-6 as well. Exit code 0 if the others differ only where
tests/conformance/README.md says so; 1 if one differs elsewhere or could not be run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "tests" / "conformance"
PACKAGES = {
    "trl": ["trl==1.16.0"],
    "verl": [
        "verl==0.9.1", "ray", "msgpack", "tensordict", "pyvers", "omegaconf", "antlr4-python3-runtime==4.9.3",
        "hydra-core", "codetiming",
    ],
}  # fmt: skip
INSTALL_S, RUN_S = 900, 600


def environment(framework: str, folder: Path) -> Path:
    """The Python of the framework's environment, made if it is not there."""
    home = folder / framework
    python = home / "bin" / "python"
    done = home / "installed"
    if done.exists() and done.read_text() == "\n".join(PACKAGES[framework]):
        return python
    print(f"making {home} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)], check=True, timeout=120)
    lines = "".join(f"import site; site.addsitedir({p!r})\n" for p in site.getsitepackages())
    found = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (Path(found.stdout.strip()) / "zz_base.pth").write_text(lines)
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES[framework]]
    subprocess.run(command, check=True, timeout=INSTALL_S)
    done.write_text("\n".join(PACKAGES[framework]))
    return python


def random_input(function: str, rng: random.Random) -> tuple[dict, dict]:
    """A random case of `function`: inputs and options that all frameworks have."""
    rows, seq = rng.randint(1, 4), rng.randint(1, 6)
    grid = lambda scale=1.0: [[scale * rng.gauss(0, 1) for _ in range(seq)] for _ in range(rows)]  # noqa: E731
    mask = [[int(t == 0 or rng.random() < 0.7) for t in range(seq)] for _ in range(rows)]
    if function.startswith("advantages."):
        n, k = rng.randint(1, 4), rng.randint(2, 5)
        rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 1)]) for _ in range(n * k)]
        return {"rewards": rewards, "groups": [f"g{i // k}" for i in range(n * k)]}, {}
    if function == "returns.gae":
        return {"rewards": grid(), "values": grid(), "mask": mask}, {"discount": rng.random(), "trace": rng.random()}
    if function.startswith("preference."):
        return random_preference(function, rng)
    if function == "loss.value":
        names = {n: grid() for n in ("values", "old_values", "returns")}
        return names | {"mask": mask, "micro_batches": [[r] for r in range(rows)]}, {"clip": 0.3}
    if function == "correction.weights":
        return {"log_ratios": grid(), "mask": [[1] * seq for _ in range(rows)]}, {"level": rng.choice(["token", "sequence_sum"])}
    logprobs = grid()
    moved = [[x + 0.3 * rng.gauss(0, 1) for x in row] for row in logprobs]
    if function == "kl.estimate":
        return {"logprobs": logprobs, "reference_logprobs": moved, "mask": mask}, {"kind": "k3"}
    if function == "logprobs.token":
        return {"logits": [grid(3.0)[:1] * seq], "tokens": [[rng.randrange(seq) for _ in range(seq)]]}, {}
    if function == "entropy.vocabulary":
        return {"logits": [grid(3.0)]}, {}
    if function == "loss.batch":
        parts = [[r] for r in range(rows)]
        how = rng.choice(["token", "sequence"])
        return {"token_losses": grid(), "mask": mask, "micro_batches": parts}, {"normalise": how}
    advantages = [[rng.gauss(0, 1)] * seq for _ in range(rows)]
    inputs = {"logprobs": logprobs, "old_logprobs": moved, "advantages": advantages, "mask": mask}
    options = {"loss.cispo": {"max_ratio": 1.2}, "loss.ppo_clip": {"clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0}}
    return inputs, options.get(function, {"clip": 0.1, "clip_high": 0.1})


def random_preference(function: str, rng: random.Random) -> tuple[dict, dict]:
    n = rng.randint(1, 5)
    below_zero = lambda: [-rng.expovariate(0.5) - 1e-3 for _ in range(n)]  # noqa: E731
    if function == "preference.kto":
        inputs = {"logprobs": below_zero(), "reference": below_zero(), "desirable": [rng.random() < 0.5 for _ in range(n)]}
        return inputs, {"beta": 0.3, "reference_point": rng.gauss(0, 1), "undesirable_weight": 1.3}
    inputs = {"chosen": below_zero(), "rejected": below_zero()}
    if function in ("preference.dpo", "preference.ipo"):
        inputs |= {"reference_chosen": below_zero(), "reference_rejected": below_zero()}
    if function == "preference.bradley_terry":
        inputs |= {"margin": below_zero()}
    options = {"bradley_terry": {"centre": 0.01}, "simpo": {"beta": 2.0, "margin": 0.7}}
    return inputs, options.get(function.partition(".")[2], {"beta": 0.3})


RANDOM = (
    "advantages.grpo", "advantages.dr_grpo", "advantages.rloo", "returns.gae", "loss.ppo_clip", "loss.gspo",
    "loss.cispo", "loss.batch", "loss.value", "correction.weights", "kl.estimate", "entropy.vocabulary",
    "logprobs.token", "preference.dpo", "preference.ipo", "preference.kto", "preference.orpo", "preference.simpo",
    "preference.bradley_terry",
)  # fmt: skip
COMPARED = ("advantages", "loss", "gradient", "gradient_rejected", "value", "entropy", "weights", "logprobs")


def work(framework: str, out: Path, count: int) -> None:
    """In the framework's environment: results of all cases, then of random batches, as JSON."""
    sys.path.insert(0, str(SUITE))
    from adapter_milkweed import MilkweedAdapter
    from conformance_suite import Case, Unsupported, load_cases, run

    adapter = importlib.import_module(f"adapter_{framework}").Adapter()
    ours = MilkweedAdapter()
    results: dict[str, list[str] | None] = {}
    for case in load_cases():
        try:
            results[case.id] = run(case, adapter, partly=True)
        except Unsupported:
            results[case.id] = None
    for function in RANDOM if count else ():
        wrong: list[str] = []
        supported = True
        for seed in range(count):
            inputs, params = random_input(function, random.Random(seed))
            own = ours.call(function, inputs, params)
            expect = {k: v for k, v in own.items() if k in COMPARED}
            case = Case(f"{seed}", function, "", "", inputs, params, expect)
            try:
                wrong += [f"seed {seed}: {w}" for w in run(case, adapter, partly=True)]
            except Unsupported:
                supported = False
        results[f"random {function}"] = wrong[:3] if supported else None
    out.write_text(json.dumps({"name": adapter.name, "results": results}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--random", type=int, default=50, help="random batches a function (0: none)")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "conformance", help="where environments live")
    parser.add_argument("--worker", nargs=2, metavar=("FRAMEWORK", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]), options.random)
        return 0
    unknown = [f for f in options.frameworks if f not in PACKAGES]
    if unknown:
        parser.error(f"unknown framework {unknown[0]!r}: there are {', '.join(PACKAGES)}")
    columns, failed = [], False
    for framework in options.frameworks or PACKAGES:
        out = options.keep / f"{framework}.json"
        try:
            python = environment(framework, options.keep)
            command = [str(python), __file__, "--worker", framework, str(out), "--random", str(options.random)]
            subprocess.run(command, check=True, timeout=RUN_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{framework} could not be run here: {error}", file=sys.stderr)
            failed = True
            continue
        columns.append(json.loads(out.read_text()))
    if not columns:
        return 1
    table(columns)
    known = listed_differences()
    wrong = [(c["name"], case) for c in columns for case, lines in c["results"].items() if lines]
    new = [f"{name}: {case}" for name, case in wrong if case.split("-")[0] not in known]
    for line in new:
        print(f"not on the list of differences in {SUITE.name}/README.md: {line}")
    return int(failed or bool(new))


def listed_differences() -> set[str]:
    """The rows that the last column of the README's list of differences names."""
    page = (SUITE / "README.md").read_text().split("## Other frameworks")[1].split("\n## ")[0]
    last = [line.rstrip("| ").rpartition("|")[2] for line in page.splitlines() if line.startswith("| ")]
    return {word for cell in last[1:] for word in cell.replace(" ", "").split(",")}


def table(columns: list[dict]) -> None:
    """Who passes what: a line a case that anyone supports, then the sums, then what went wrong."""
    print(f"{'case':44}" + "".join(f"{c['name']:>14}" for c in columns))
    for case in columns[0]["results"]:
        row = [c["results"].get(case) for c in columns]
        if any(r is not None for r in row):
            words = ["-" if r is None else "differs" if r else "passes" for r in row]
            print(f"{case:44}" + "".join(f"{w:>14}" for w in words))
    for c in columns:
        some = [r for r in c["results"].values() if r is not None]
        print(f"\n{c['name']}: {sum(not r for r in some)} of {len(some)} it has pass")
        for case, wrong in c["results"].items():
            for line in wrong or ():
                print(f"  {case}: {line[:180]}")


if __name__ == "__main__":
    raise SystemExit(main())
