"""The conformance suite itself: it must fail what is wrong, and tell unsupported from refused."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from conformance_suite import Case, Unsupported, decode, load_cases, run  # noqa: E402

ROWS = {
    "A": "1 2 3 4 6 7 9 10 11 12 14 15 17 20 21",
    "G": "1 3 4 5 6 8",
    "L": "1 2 4 5 6 8 10 12 14 15 17 18 20 21 23 25 26",
    "K": "1 3 4",
    "T": "1 2 3 5 6 7 8 10 13 14 17 18 19 20 21 22 23 24 25 26",
    "S": "1 3 4 5 6 7 8 9 10 11 13 14 15 16 18 19 20",
    "R": "1 3 4 5 6 7 9 11 12 14 15 16 18 19 20 22 23",
    "W": "1 2 3 5 6 7 8 9 10",
}
"""Every row of the list of reports that the suite restates."""


def test_every_row_is_a_case_or_held_by_a_test_that_exists_or_listed_with_its_reason():
    tests = Path(__file__).parents[1]
    names = {n for f in tests.rglob("test_*.py") for n in re.findall(r"def (test_\w+)", f.read_text())}
    page = (tests / "conformance" / "README.md").read_text()
    held, yet = page.split("## Rows that other tests hold")[1].split("## Rows that do not apply yet")
    assert not set(re.findall(r"`(test_\w+)`", held)) - names

    def listed(part):
        return {i for line in part.splitlines() if line[:3] != "|--" for i in re.findall(r"\b[A-Z]\d+\b", line.split("|")[1] if "|" in line else "")}

    tested = {re.match(r"[A-Z]+\d+", c.id).group() for c in load_cases()}
    tested |= {i for n in names for i in n.split("_")[1:] if re.fullmatch(r"[A-Z]\d+", i)}
    rows = {letter + number for letter, numbers in ROWS.items() for number in numbers.split()}
    assert rows - tested - listed(held) - listed(yet) == set()
    assert listed(yet) & (tested | listed(held)) == set() and listed(held) | listed(yet) <= rows


def test_every_listed_difference_to_another_framework_has_its_case():
    import importlib.util

    spec = importlib.util.spec_from_file_location("conformance_tool", Path(__file__).parents[2] / "tools" / "conformance.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    listed = tool.listed_differences()
    assert len(listed) > 15 and listed <= {c.id.split("-")[0] for c in load_cases()}


class Fixed:
    name = "fixed"

    def __init__(self, result):
        self.result = result

    def call(self, function, inputs, params):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def case(**fields):
    return Case(**{"id": "X1", "function": "f", "source": "own", "says": "", **fields})


@pytest.mark.parametrize(
    ("got", "want", "passes"),
    [
        ([1.0, 0.0], [1.0, 0.0], True),
        ([1.0, 1e-3], [1.0, 0.0], False),
        ([1.0], [1.0, 0.0], False),
        ([[1.0]], [1.0], False),
        (1.0, [1.0], False),
        ([float("nan")], [float("nan")], True),
        ([0.0], [float("nan")], False),
        ([float("nan")], [0.0], False),
        ([True], [False], False),
    ],
)
def test_a_wrong_value_shape_or_nan_fails(got, want, passes):
    assert (not run(case(expect={"x": want}), Fixed({"x": got}))) is passes


def test_not_finite_and_above_a_limit_fail():
    assert run(case(finite=("x",)), Fixed({"x": [1.0, float("inf")]}))
    assert run(case(at_most={"x": 1.0}), Fixed({"x": [1.6]}))


def test_an_input_that_must_be_refused_and_was_not_fails():
    assert run(case(raises=True), Fixed({"x": 1}))
    assert not run(case(raises=True), Fixed(ValueError("no")))
    assert run(case(), Fixed(ValueError("no")))


def test_unsupported_is_not_taken_for_refused():
    with pytest.raises(Unsupported):
        run(case(raises=True), Fixed(Unsupported("f")))


def test_an_output_that_is_missing_fails_unless_part_is_enough():
    both = case(expect={"x": 1.0, "y": 2.0})
    assert run(both, Fixed({"x": 1.0})) == ["y: not given"]
    assert not run(both, Fixed({"x": 1.0}), partly=True)
    assert run(both, Fixed({"x": 3.0}), partly=True)
    with pytest.raises(Unsupported):
        run(both, Fixed({}), partly=True)


def test_every_case_asserts_something_and_ids_are_unique():
    cases = load_cases()
    assert len({c.id for c in cases}) == len(cases) > 150
    bare = [c.id for c in cases if not (c.expect or c.finite or c.at_most or c.raises)]
    assert all("taken" in i or "full" in i for i in bare), bare


def test_words_for_numbers_that_json_lacks():
    assert decode({"repeat": [0.5, 3]}) == [0.5] * 3
    assert decode(["inf", ["-inf"]]) == [float("inf"), [float("-inf")]]
