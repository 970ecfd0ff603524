"""`__init__.pyi` says the same as the table that loads names on first use: type checkers see what runs."""

import re
from pathlib import Path

import milkweed


def test_the_stub_names_every_public_name_at_its_home():
    stub = Path(milkweed.__file__).with_suffix(".pyi").read_text()
    found = {name: home for home, name, again in re.findall(r"^from (\S+) import (\w+) as (\w+)$", stub, re.M) if name == again}
    expected = {}
    for name, home in milkweed._PUBLIC.items():
        module = f"milkweed.{home.rstrip(':')}"
        expected[name] = module.rpartition(".")[0] if home.endswith(":") else module
    assert found == expected
