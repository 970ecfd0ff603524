"""Traced layouts are the engine's own: for every model, degree and cut of the trainer, what engines copy equals, bit for
bit, what SGLang loads from disk."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_trainer import make_model

from milkweed.rollout.sglang_engine import engine_environment

pytestmark = [pytest.mark.stack, pytest.mark.slow]
HERE = Path(__file__).parent
FAMILIES = {"qwen3 tied": (1, 2, 4), "llama 3.1": (1, 2, 4), "moe": (1, 2, 4), "smollm2": (1, 3)}
"""Engine degrees that divide the model's heads: SmolLM2 has nine."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> tuple[Path, list[Path], dict[str, bool]]:
    place = tmp_path_factory.mktemp("truth")
    folders = []
    for family in FAMILIES:
        folder = make_model(place / family.replace(" ", "").replace(".", ""), family)
        (folder / "tokenizer.json").unlink()  # SGLang would read it
        folders.append(folder)
    env = os.environ | engine_environment(cpu=True) | {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
    command = [sys.executable, str(HERE / "layout_truth.py"), "1,2,3,4", str(place), *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return place, folders, json.loads(done.stdout.strip().splitlines()[-1])


def test_packed_shards_equal_what_the_loader_loads(truth):
    _, _, found = truth
    assert len(found) == sum(map(len, FAMILIES.values())) * 2 * 4  # dtypes, cuts
    assert [name for name, equal in found.items() if not equal] == []


@pytest.mark.parametrize(
    "degrees",
    [{}, {"data_parallel_shard": 2}, {"tensor_parallel": 2}, {"data_parallel_shard": 2, "tensor_parallel": 2}],
    ids=["one", "fsdp2", "tp", "fsdp2xtp"],
)
@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=FAMILIES)
def test_torchtitans_shards_equal_what_the_loader_loads(truth, degrees, family, tmp_path):
    place, folders, _ = truth
    engines = list(FAMILIES.values())[family]
    if "tensor_parallel" in degrees and 2 not in engines:
        degrees = degrees | {"tensor_parallel": 3}
    ranks = degrees.get("data_parallel_shard", 1) * degrees.get("tensor_parallel", 1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(HERE / "weights_ranks.py"), str(place), json.dumps(degrees), str(folders[family])]
    processes = []
    try:
        for rank in range(ranks):
            with (tmp_path / f"{rank}.log").open("w") as log:
                own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
        codes = [p.wait(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert codes == [0] * ranks, (tmp_path / "0.log").read_text()[-3000:]
    found = json.loads((place / "ranks.json").read_text())
    assert len(found) == len(engines) + 1 and all(found.values()), found
