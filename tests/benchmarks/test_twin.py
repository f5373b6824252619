"""The audit's findings that have a check on the twin node stay mended, and tests tell of theirs."""

from pathlib import Path

import pytest

from benchmarks.twin.checks import preload_touches
from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.findings import FINDINGS, SECOND_DAY, Finding
from benchmarks.twin.named_tests import Outcome, named_tests, run_named_tests

pytestmark = pytest.mark.twin
#: Checked by tests/workload/meters/test_nvml_on_twin.py with more windows.
ELSEWHERE = {12}
#: Not mended yet: `python -m benchmarks.twin` tells why.
OPEN: set[int] = set()


def test_every_finding_has_its_number() -> None:
    assert [finding.number for finding in FINDINGS] == list(range(1, 21))
    assert all(finding.number == number for number, finding in SECOND_DAY.items())


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
    ]
    + [
        pytest.param(finding, id=f"second_day_{number}")
        for number, finding in SECOND_DAY.items()
        if finding.check
    ],
)
def test_a_mended_finding_stays_so(finding: Finding) -> None:
    assert finding.check is not None
    assert finding.check() == ""


TORCH = """
from types import SimpleNamespace as N
_C, cuda, version, __version__ = N(), N(is_initialized=lambda: False), N(cuda={cuda!r}), "2.13.0"
"""


@pytest.mark.parametrize(("cuda", "touches"), [("13.0", 1), (None, None)])
def test_second_day_12_only_a_cuda_build_tells_if_the_preload_starts_the_driver(
    tmp_path: Path, cuda: str | None, touches: int | None
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
    (tmp_path / "deepspeed.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    assert preload_touches(tmp_path) == touches


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
        "        '''finding_3 and second_day_14.'''\n"
        "def test_finding_5_skipped(): pytest.skip('no GPU')\n"
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
