"""Every case of `cases/` under its id, against Milkweed."""

import pytest
from adapter_milkweed import MilkweedAdapter
from conformance_suite import Case, load_cases, run


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.id)
def test_conformance(case: Case) -> None:
    wrong = run(case, MilkweedAdapter())
    assert not wrong, f"{case.id} ({case.source}): {case.says}\n" + "\n".join(wrong)
