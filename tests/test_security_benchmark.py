"""The attacks of `benchmarks.security`: none of them works, and they can be seen to work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.security import FINDINGS, attack
from benchmarks.security_tools import ROOT, Attempt, Finding, environment


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
def test_no_other_finding_of_the_security_reviews_is_open() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.security"],
        check=True,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    # Still open: 7, 10 and 15 of the second review.
    still = {line.split()[0] for line in done.stdout.splitlines() if " OPEN " in line}
    assert still <= {"19", "22", "27"}, done.stdout


def test_every_group_of_findings_is_attacked_once() -> None:
    assert [finding.number for finding in FINDINGS] == list(range(1, 30))


def test_an_attack_that_fails_to_run_counts_as_open() -> None:
    def broken(folder: object) -> list[Attempt]:
        raise OSError("no such command")

    (attempt,) = attack(Finding(1, "broken", broken))
    assert attempt.open
    assert "no such command" in attempt.note
