"""The `milkweed` command."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Sequence

from milkweed import __version__
from milkweed.errors import ConfigError, MilkweedError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `milkweed`. Returns the exit status: 0 well, 1 an error that was explained, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="milkweed", description="Reinforcement-learning post-training from one Python controller.")
    parser.add_argument("--version", action="version", version=f"milkweed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a recipe, or go on with the run in a directory")
    run.add_argument("target", help="a recipe (recipes/grpo.py) or a run directory")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the recipe (see RECIPE --help)")
    init = commands.add_parser("init", help="copy the mesh files and recipes into a folder, to begin from")
    init.add_argument("folder", nargs="?", default=".", help="where to (default: here)")
    check = commands.add_parser("audit", help="prove that a run's sums agree: issued = trained + dropped + held")
    check.add_argument("folder", type=Path, help="a run directory")
    check.add_argument("--json", action="store_true", help="the report as one line of JSON")
    shown = commands.add_parser("show", help="trajectories of a run: turns, rewards, tokens coloured by advantage")
    shown.add_argument("folder", type=Path, help="a run directory")
    shown.add_argument("--step", type=int, help="those that this step trained (default: the last)")
    shown.add_argument("--group", default="", help="those of this group")
    shown.add_argument("--n", type=int, default=4, help="how many (default: 4)")
    shown.add_argument("--colour", choices=("advantage", "logprob", "difference"), default="advantage", help="what colours a sampled token: its advantage, its log-prob, or how far the trainer's log-prob was from the engine's")
    serve = commands.add_parser("serve", help="serve a model folder behind an OpenAI-compatible API")
    serve.add_argument("model", help="a model folder (config.json, safetensors, tokenizer)")
    serve.add_argument("--mesh", default="local", help="mesh file, or the name of one that comes with Milkweed (default: local)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    serve.add_argument("--token", default=os.environ.get("MILKWEED_API_KEY", ""), help="what callers must bring (default: $MILKWEED_API_KEY, or one made up)")
    serve.add_argument("--name", default="", help="the model's name (default: the folder's)")
    parting = commands.add_parser("diff", help="name the first step and quantity in which two runs part")
    parting.add_argument("one", type=Path)
    parting.add_argument("other", type=Path)
    again = commands.add_parser("replay", help="train a run again from its ledger, and see that the same parameters come of it")
    again.add_argument("folder", type=Path, help="a run directory")
    again.add_argument("--mesh", default="", help="mesh file (default: the run's)")
    again.add_argument("--steps", type=int, default=0, help="stop after this step (default: at the last checkpoint)")
    doctor = commands.add_parser("doctor", help="check this machine and its packages, and say how to mend what is wrong")
    doctor.add_argument("arguments", nargs=argparse.REMAINDER)
    plan = commands.add_parser("plan", help="what an update of the weights will move, link by link", add_help=False)
    plan.add_argument("arguments", nargs=argparse.REMAINDER)
    if argv is None:
        argv = sys.argv[1:]
    if list(argv[:1]) == ["plan"]:  # all that follows is its own, also what begins with a dash
        arguments = argparse.Namespace(command="plan", arguments=list(argv[1:]))
    else:
        arguments = parser.parse_args(argv)
    try:
        if arguments.command == "plan":
            from milkweed.runs.planning import main as plan_main

            return plan_main(arguments.arguments)
        if arguments.command == "run":
            return run_target(arguments.target, arguments.arguments)
        if arguments.command == "init":
            return init_folder(Path(arguments.folder))
        if arguments.command == "audit":
            return audit_run(arguments.folder, as_json=arguments.json)
        if arguments.command == "show":
            from milkweed.observe.show import show_run

            show_run(arguments.folder, step=arguments.step, group=arguments.group, most=arguments.n, colour=arguments.colour)
            return 0
        if arguments.command == "serve":
            return serve_model(arguments)
        if arguments.command == "diff":
            from milkweed.runs.diff import diff

            print(difference := diff(arguments.one, arguments.other) or "no difference in the steps that both have")
            return 0 if difference.startswith("no ") else 1
        if arguments.command == "replay":
            from milkweed.runs.replay import main as replay_main
            from milkweed.runs.script import leave

            leave(replay_main(arguments.folder, mesh=arguments.mesh, steps=arguments.steps))
        from milkweed.doctor import main as check

        return check(arguments.arguments)
    except MilkweedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def audit_run(folder: Path, *, as_json: bool = False) -> int:
    """Print the audit of the run in `folder`; 1 where its sums do not agree."""
    import json

    import msgspec

    from milkweed.data.ledger import audit

    report = audit(folder)
    print(json.dumps({**msgspec.to_builtins(report), "held": report.held, "agrees": report.agrees}) if as_json else report.text())
    return 0 if report.agrees else 1


def serve_model(arguments: argparse.Namespace) -> int:
    """Engines of the mesh behind the gateway, until Ctrl-C."""
    import asyncio

    from milkweed.rollout.gateway import Gateway
    from milkweed.runs.mesh import up

    async def serve() -> None:
        said = lambda text: print(text, file=sys.stderr, flush=True) if text else None  # noqa: E731
        async with await up(arguments.mesh, model=arguments.model, roles=("rollout",), progress=said) as mesh:
            name = arguments.name or mesh.model.name
            options = {"model": name, "host": arguments.host, "port": arguments.port, "token": arguments.token}
            async with Gateway(mesh.rollout, mesh.chat, **options) as gateway:
                print(f"serving {name}: OPENAI_BASE_URL={gateway.base_url} OPENAI_API_KEY={gateway.token}", flush=True)
                await gateway.ended()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0


def run_target(target: str, arguments: list[str]) -> int:
    """Run a recipe file as a script, or the recipe of the run in a directory, which then resumes."""
    path = Path(target)
    if path.is_dir():
        from milkweed.runs.directory import read_record

        record = read_record(path)
        recipe = Path(record.recipe)
        if not recipe.exists():
            raise ConfigError(f"{path}/run.json names the recipe {recipe}, which is not there (any more); put it back, or run it from where it is with --run-dir {path}")
        arguments = [*_without(record.arguments, "--run-dir"), "--run-dir", str(path), *arguments]
        path = recipe
    elif not path.exists():
        raise ConfigError(f"{target} is neither a recipe nor a run directory; `milkweed init` copies the recipes here")
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.absolute().parent))  # as `python recipe.py` does: recipes import each other
    runpy.run_path(str(path), run_name="__main__")
    return 0


def _without(arguments: list[str], flag: str) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == flag:
            skip = True
        elif not argument.startswith(flag + "="):
            kept.append(argument)
    return kept


def init_folder(folder: Path) -> int:
    """Copy meshes/ and recipes/ into `folder`. Files that are there already are left alone, and named."""
    from milkweed.config.mesh import shipped

    for kind in ("meshes", "recipes"):
        source, target = shipped(kind), folder / kind
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.suffix not in (".toml", ".py", ".ipynb"):
                continue
            place = target / file.name
            if place.exists():
                print(f"kept    {place}")
            else:
                shutil.copyfile(file, place)
                print(f"copied  {place}")
    print(f"next: python {os.path.join(folder, 'recipes', 'grpo.py')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
