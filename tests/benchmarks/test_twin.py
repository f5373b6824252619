"""The audit's findings that have a check on the twin node stay mended, and tests tell of theirs."""

from pathlib import Path

import pytest

from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.findings import FINDINGS, Finding
from benchmarks.twin.named_tests import Outcome, named_tests, run_named_tests

pytestmark = pytest.mark.twin
#: Checked by tests/workload/meters/test_nvml_on_twin.py with more windows.
ELSEWHERE = {12}
#: Not mended yet: `python -m benchmarks.twin` tells why.
OPEN: set[int] = set()


def test_every_finding_has_its_number() -> None:
    assert [finding.number for finding in FINDINGS] == list(range(1, 21))


@pytest.mark.parametrize(
    "finding",
    [
        pytest.param(
            finding,
            id=str(finding.number),
            marks=[pytest.mark.xfail(reason="open")] if finding.number in OPEN else [],
        )
        for finding in FINDINGS
        if finding.check and finding.number not in ELSEWHERE
    ],
)
def test_a_mended_finding_stays_so(finding: Finding) -> None:
    assert finding.check is not None
    assert finding.check() == ""


def test_a_finding_is_mended_by_its_check_its_tests_or_both() -> None:
    passed, failed = Outcome(2), Outcome(1, ("test_it",))
    assert Finding(99, "a fault").state(Outcome()) == "nothing checks it"
    assert Finding(99, "a fault").state(passed) == ""
    assert Finding(99, "a fault").state(failed) == "failed: test_it"
    assert Finding(99, "a fault", lambda: "").state(Outcome()) == ""
    assert Finding(99, "a fault", lambda: "").state(failed) == "failed: test_it"
    assert Finding(99, "a fault", lambda: "it is there").state(passed) == "it is there"
    assert Finding(99, "a fault", lambda: "", "a part").state(passed) == "nothing checks a part"
    assert Finding(99, "a fault", lambda: "").means(failed) == "twin node, 2 tests"


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
        "        '''finding_3 and finding_14.'''\n"
        "def test_finding_5_skipped(): pytest.skip('no GPU')\n"
        "def test_of_nothing(): assert False\n"
    )
    found = named_tests(tmp_path / "tests")
    assert found == {
        "tests/part/test_it.py::test_finding_3_twice": {3},
        "tests/part/test_it.py::TestMore::test_more": {3, 14},
        "tests/part/test_it.py::test_finding_5_skipped": {5},
    }
    monkeypatch.setattr("benchmarks.twin.named_tests.ROOT", tmp_path)
    outcomes = run_named_tests(tests=tmp_path / "tests")
    assert outcomes == {
        3: Outcome(2, ("tests.part.test_it::test_finding_3_twice[2]",)),
        14: Outcome(1),
    }


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02
