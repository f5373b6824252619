"""The benchmark of safe exploration on a table of our own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.search.problems import Problem
from benchmarks.search.safety import capped_search
from tuner.testing.studies import write_table


def test_fewer_windows_exceed_the_cap(tmp_path: Path) -> None:
    problem = Problem(write_table(tmp_path / "table"), "made-up")
    found = {
        safe: [capped_search(problem, seed, 0.5, safe) for seed in range(3)]
        for safe in (False, True)
    }
    violations = {safe: sum(o.violations for o in several) for safe, several in found.items()}
    assert violations[True] < violations[False]
