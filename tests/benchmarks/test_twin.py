"""The audit's findings that have a check on the twin node stay mended."""

import pytest

from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.findings import FINDINGS, Finding

pytestmark = pytest.mark.twin
#: Checked by tests/workload/meters/test_nvml_on_twin.py with more windows.
ELSEWHERE = {12}


def test_every_finding_has_its_number() -> None:
    assert [finding.number for finding in FINDINGS] == list(range(1, 21))


@pytest.mark.parametrize(
    "finding",
    [finding for finding in FINDINGS if finding.check and finding.number not in ELSEWHERE],
    ids=lambda finding: str(finding.number),
)
def test_a_mended_finding_stays_so(finding: Finding) -> None:
    assert finding.check is not None
    assert finding.check() == ""


def test_a_finding_without_a_check_is_open() -> None:
    assert Finding(99, "a fault").state() == "not checked here"
    assert "a part" in Finding(99, "a fault", lambda: "", "a part").state()
    assert Finding(99, "a fault", lambda: "it is there").state() == "it is there"


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02
