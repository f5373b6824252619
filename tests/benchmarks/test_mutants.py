"""Changes of code that tests are to notice."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from benchmarks.mutants import (
    SUBJECTS,
    TOUCH,
    Suite,
    compiles,
    drawn,
    is_likely,
    outdated,
    reasons,
    shares,
    statement,
)
from tests.support.commands import finished

TEXT = """def f(a: int | None, limit_s: float) -> float:
    if a is None or limit_s <= 0:
        return 3600.0
    return a * limit_s
"""


def test_the_files_and_their_tests_exist() -> None:
    for file, tests in SUBJECTS.values():
        assert all((ROOT / each).exists() for each in (file, *tests))


def test_as_many_changes_are_made_as_are_asked_for() -> None:
    assert shares(200, 6) == [33, 33, 34, 33, 33, 34]
    assert shares(40, 1) == [40]
    assert sum(shares(2, 6)) == 2


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
    made = list(islice(drawn("f", TEXT), 3))
    assert len({change.row for change in made}) == 3
    assert all(compiles(change.code) and change.code != TEXT for change in made)
    assert [str(each) for each in made] == [str(each) for each in islice(drawn("f", TEXT), 3)]
    of_one = list(drawn("f", TEXT, lines={"return a * limit_s"}))
    assert {change.after for change in of_one} >= {"return a + limit_s", "return a / limit_s"}
    assert {change.row for change in of_one} == {4}


def test_every_reason_is_of_a_change_that_can_be_made() -> None:
    pytest.importorskip("cosmic_ray")
    assert outdated(reasons()) == []
    gone = ("window", "no such line", "nor this one")
    assert outdated([gone]) == ["window: no such line  ->  nor this one"]


@pytest.mark.parametrize(
    ("row", "rows"), [(1, range(1, 2)), (2, range(2, 3)), (3, range(3, 4)), (9, range(0))]
)
def test_a_statement_ends_where_its_body_begins(row: int, rows: range) -> None:
    assert statement(TEXT, row) == rows


def test_tests_that_run_a_line_come_first_and_the_quickest_before_others() -> None:
    tests = Suite.__new__(Suite)
    tests.seconds = {"slow": 3.0, "quick": 0.1, "elsewhere": 0.2, "none": 0.0}
    tests.lines = {"slow": {2, 3}, "quick": {3}, "elsewhere": {4}, "none": set()}
    assert tests.in_order([3]) == (["quick", "slow"], ["none", "elsewhere"])
    assert tests.in_order([1]) == (["quick", "elsewhere", "slow"], ["none"])  # as it is imported


def test_what_tests_of_two_folders_run_is_noted_where_each_has_its_own_conftest(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "conftest.py").touch()
        (tmp_path / name / f"test_{name}.py").write_text("def test_it():\n    assert True\n")
    result = tmp_path / "touched.json"
    words = ("-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    done = finished([sys.executable, "-c", TOUCH, "test_second.py", str(result), *words], cwd=ROOT)
    assert done.returncode == 0, done.stdout
    _, found = json.loads(result.read_text())
    assert {test: rows for test, (_, rows) in found.items()} == {
        "first/test_first.py::test_it": [],
        "second/test_second.py::test_it": [2],
    }
