"""`milkweed plan`: what an update of the weights will move, before anything runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from milkweed.errors import ConfigError
from milkweed.transfer.plan import EngineLayout
from milkweed.transfer.predict import Degrees, predict, table


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError, DataError or TransferError."""
    parser = argparse.ArgumentParser(prog="milkweed plan", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder; its config.json is enough")
    parser.add_argument("--trainer", default="", help="fsdpN, tpN, ddpN, hsdpNxM, or several with commas (default: one rank)")
    parser.add_argument("--engines", default="1xtp1", help="ENGINESxtpN, such as 64xtp8 (default: 1xtp1)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the engines")
    parser.add_argument("--gb-s", type=float, default=5.0, help="bandwidth of a link assumed, GB/s")
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON")
    options = parser.parse_args(argv)
    match = re.fullmatch(r"(?:(\d+)x)?tp(\d+)", options.engines)
    if match is None:
        raise ConfigError(f"--engines {options.engines!r} is not like 64xtp8")
    engines, degree = int(match[1] or 1), int(match[2])
    began = time.perf_counter()
    layout, layers = representative(Path(options.model), degree, options.dtype)
    traced = time.perf_counter()
    found = predict(layout, Degrees.parse(options.trainer), engines=engines, layers=layers, gb_s=options.gb_s)
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(table(found))
        print(f"traced in {traced - began:.1f} s, planned in {time.perf_counter() - traced:.1f} s; layout {layout.digest()}")
    return 0


def representative(folder: Path, degree: int, dtype: str) -> tuple[EngineLayout, int]:
    """The layout of an engine with one layer of each kind, and how many layers that one stands for (0: all were
    traced). From the cache where it was made before, by what went in."""
    from milkweed.rollout.sglang_layout import engine_layout
    from milkweed.training.model import read_architecture

    shapes = read_architecture(folder).weights()
    numbers = sorted({int(m[1]) for n in shapes if (m := re.search(r"\.layers\.(\d+)\.", n))})
    alike = len(numbers) > 1 and all(_layer(shapes, n) == _layer(shapes, numbers[0]) for n in numbers)
    config = json.loads((folder / "config.json").read_text())
    if alike:
        config["num_hidden_layers"] = 1
        config.pop("layer_types", None)
        config.pop("max_window_layers", None)
        shapes = {n: s for n, s in shapes.items() if ".layers." not in n or ".layers.0." in n}
    from milkweed.rollout.sglang_engine import SGLANG_VERSION

    what = json.dumps([config, sorted(shapes.items()), degree, dtype, SGLANG_VERSION, 1], sort_keys=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "milkweed" / "plans"
    file = cache / f"{hashlib.blake2b(what.encode(), digest_size=12).hexdigest()}.msgpack"
    if file.is_file():
        layout = msgspec.msgpack.decode(file.read_bytes(), type=EngineLayout)
    else:
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(config))
            for side in folder.glob("tokenizer*"):
                shutil.copy(side, place)
            layout = engine_layout(place, degree, dtype, tensors=shapes)
        cache.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(msgspec.msgpack.encode(layout))
        partial.replace(file)
    return layout, len(numbers) if alike else 0


def _layer(shapes: dict[str, tuple[int, ...]], number: int) -> dict[str, tuple[int, ...]]:
    return {n.replace(f".layers.{number}.", "."): s for n, s in shapes.items() if f".layers.{number}." in n}
