"""The benchmark of fidelities: fewer replicas first, and windows of half the length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.search import fidelity
from benchmarks.search.problems import Problem
from benchmarks.simulated_tables import record
from tuner.workload.table import load_table

SMALL = ("opt-350m", "a100-8", "parallelism")


def test_shorter_windows_are_noisier(tmp_path: Path) -> None:
    record(tmp_path / "long", *SMALL, most=2, spread=0, of_values=0, error=0, seed=0)
    long = load_table(tmp_path / "long")
    problem = fidelity.halve_windows(Problem(tmp_path / "long", long.groups[0].name))
    short = load_table(problem.folder)
    assert short.cost.window_s == pytest.approx(long.cost.window_s / 2)
    assert short.noise.power_cv == pytest.approx(2**0.5 * long.noise.power_cv)
    assert short.groups[0].points == long.groups[0].points


def test_the_command_prints_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "PROBLEMS", (SMALL,))
    out = tmp_path / "figures.json"
    fidelity.main(["--tables", "0", "--launches", "5", "--json", str(out)])
    figures = {figure["name"]: figure["value"] for figure in json.loads(out.read_text())}
    assert set(figures) == {
        f"{name}_{figure}_ratio"
        for name in ("fewer_replicas", "short_windows")
        for figure in ("joules", "worst")
    }
    assert 0 < figures["short_windows_joules_ratio"] <= figures["short_windows_worst_ratio"]
