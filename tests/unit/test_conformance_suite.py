"""The conformance suite itself: it must fail what is wrong, and tell unsupported from refused."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from conformance_suite import Case, Unsupported, decode, load_cases, run  # noqa: E402


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
