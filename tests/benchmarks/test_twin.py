"""The audits' findings have tests, whose outcomes are counted."""

from pathlib import Path

import pytest

from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.findings import FINDINGS, THIRD_DAY, by_key
from benchmarks.twin.named_tests import Outcome, named_tests, run_named_tests

pytestmark = pytest.mark.twin


def test_every_finding_but_one_has_a_test() -> None:
    assert list(FINDINGS) == list(range(1, 21))
    assert list(THIRD_DAY) == list(range(1, 16))
    named = set().union(*named_tests().values())
    assert set(by_key()) - named == {"finding_10"}  # its mend was too inaccurate, and went


def test_a_finding_is_mended_by_its_tests() -> None:
    assert Outcome().state == "no test of it passed"
    assert Outcome(2).state == ""
    assert Outcome(1, ("test_it",)).state == "failed: test_it"


def test_tests_are_found_by_name_and_docstring_and_their_outcomes_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "part").mkdir(parents=True)
    (tmp_path / "tests" / "part" / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_finding_3_twice(n): assert n == 1\n"
        "class TestMore:\n"
        "    def test_more(self):\n"
        "        '''finding_3 and second_day_14.'''\n"
        "def test_finding_5_skipped(): pytest.skip('no GPU')\n"
        "@pytest.mark.slow\n"
        "def test_finding_7_slow(): pass\n"
        "def test_of_nothing(): assert False\n"
    )
    found = named_tests(tmp_path / "tests")
    assert found == {
        "tests/part/test_it.py::test_finding_3_twice": {"finding_3"},
        "tests/part/test_it.py::TestMore::test_more": {"finding_3", "second_day_14"},
        "tests/part/test_it.py::test_finding_5_skipped": {"finding_5"},
    }
    monkeypatch.setattr("benchmarks.twin.named_tests.ROOT", tmp_path)
    outcomes = run_named_tests(tests=tmp_path / "tests")
    assert outcomes == {
        "finding_3": Outcome(2, ("tests.part.test_it::test_finding_3_twice[2]",)),
        "second_day_14": Outcome(1),
    }


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02
