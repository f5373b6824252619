"""Changes of code that tests are to notice."""

from __future__ import annotations

import pytest

from benchmarks.figures import ROOT
from benchmarks.mutants import SUBJECTS, compiles, drawn, is_likely

TEXT = """def f(a: int | None, limit_s: float) -> float:
    if a is None or limit_s <= 0:
        return 3600.0
    return a * limit_s
"""


def test_the_files_and_their_tests_exist() -> None:
    for file, tests in SUBJECTS.values():
        assert all((ROOT / each).exists() for each in (file, *tests))


@pytest.mark.parametrize(
    ("operator", "likely"),
    [
        ("core/ReplaceComparisonOperator_LtE_Lt", True),
        ("core/ReplaceComparisonOperator_Is_IsNot", True),
        ("core/ReplaceComparisonOperator_Eq_Is", False),
        ("core/ReplaceBinaryOperator_Mul_Div", True),
        ("core/ReplaceBinaryOperator_BitOr_Add", False),
        ("core/NumberReplacer", True),
        ("core/VariableInserter", False),
    ],
)
def test_changes_are_those_that_a_person_could_make(operator: str, likely: bool) -> None:
    assert is_likely(operator) is likely


def test_changes_are_of_different_lines_and_are_python() -> None:
    pytest.importorskip("cosmic_ray")
    made = list(drawn("f", TEXT, 3, seed=0))
    assert len({change.line for change in made}) == 3
    assert all(compiles(change.code) and change.code != TEXT for change in made)
    assert [str(each) for each in made] == [str(each) for each in drawn("f", TEXT, 3, seed=0)]
