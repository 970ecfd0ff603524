"""What tests of recipes share: the recipes as modules, and one small Qwen3 that is right about one sum in five."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Run directories and models/ lie below `folder` within the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def recipes() -> Path:
    """The recipes' folder, importable."""
    folder = ROOT / "recipes"
    sys.path.insert(0, str(folder))
    return folder


@pytest.fixture(scope="session")
def warm(recipes, tmp_path_factory) -> Path:
    """What `sft.warm_model` makes, where every other recipe starts. Takes two minutes, unless MILKWEED_WARM_MODEL names
    the one that an earlier session made."""
    import sft

    if os.environ.get("MILKWEED_WARM_MODEL"):
        return Path(os.environ["MILKWEED_WARM_MODEL"])
    with inside(tmp_path_factory.mktemp("warm")):
        return asyncio.run(sft.warm_model()).absolute()
