"""The versions in tools/lock are exact, and every place that names a version names the locked one."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from milkweed import doctor

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "tools" / "lock"
PIN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.+!]*$")


def lines(file: str) -> list[str]:
    return [line for line in (LOCK / file).read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("files", [("cpu.txt", "cpu-no-deps.txt"), ("gpu.txt",)], ids=["cpu", "gpu"])
def test_every_line_of_a_lane_pins_one_package_exactly_and_once(files):
    pins = [line for file in files for line in lines(file)]
    assert [line for line in pins if not PIN.match(line)] == []
    names = [doctor.normal(line.split("==")[0]) for line in pins]
    assert sorted(names) == sorted(set(names))
    assert len(names) > 150


def test_both_lanes_hold_the_same_release_of_what_milkweed_is_written_against():
    cpu, gpu = doctor.locked("cpu"), doctor.locked("gpu")
    for name in (
        "sglang",
        "torchtitan",
        "torchmonarch",
        "nixl",
        "transformers",
        "msgspec",
        "reasoning-gym",
        "math-verify",
    ):
        assert cpu[name] == gpu[name], name
    assert cpu["torch"].endswith("+cpu")
    assert gpu["torch"] == "2.14.1"
    assert "sglang-kernel" in gpu and "sglang-kernel" not in cpu


@pytest.mark.parametrize(
    ("module", "constant", "package"),
    [
        ("milkweed.fleet.monarch_compat", "MONARCH_VERSION", "torchmonarch"),
        ("milkweed.transfer.nixl", "NIXL_VERSION", "nixl"),
        ("milkweed.rollout.sglang_engine", "SGLANG_VERSION", "sglang"),
        ("sglang_cpu", "SGLANG", "sglang"),
    ],
)
def test_a_module_that_uses_private_parts_names_the_locked_release(module, constant, package):
    assert getattr(importlib.import_module(module), constant) == doctor.locked("cpu")[package]


def test_torchtitan_named_in_its_module_is_the_locked_one():
    text = (ROOT / "src/milkweed/training/titan_model.py").read_text()  # read, not imported: that would import torchtitan
    assert re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE).group(1) == doctor.locked("cpu")["torchtitan"]


def test_the_cpu_distribution_has_the_version_of_the_sglang_it_fits():
    project = tomllib.loads((ROOT / "tools/sglang-cpu/pyproject.toml").read_text())["project"]
    assert project["version"] == doctor.locked("cpu")["sglang"]
    kernels = importlib.import_module("sgl_kernel")
    assert kernels.__version__ == doctor.locked("gpu")["sglang-kernel"]


def test_what_pyproject_asks_for_is_locked_and_fits():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project.get("dependencies", []), *sum(project.get("optional-dependencies", {}).values(), [])]
    pins = doctor.locked("cpu")
    for requirement in map(Requirement, asked):
        assert doctor.normal(requirement.name) in pins, requirement
        assert pins[doctor.normal(requirement.name)] in requirement.specifier, requirement


def test_no_file_of_the_set_up_names_a_registry():
    files = [*LOCK.iterdir(), ROOT / "tools/environment", ROOT / "tools/run", ROOT / "tools/test", ROOT / ".ci/run"]
    for file in files:
        assert "://" not in file.read_text(), file
