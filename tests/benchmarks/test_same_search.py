"""Searches do not change with the last bits of products of matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.same_search import CPUS, Search, differing, made_up_table, probes_on, searches
from benchmarks.search.problems import Problem
from tuner.models.surrogate import gaussian_process, kernel
from tuner.workload.table import load_table


def blurred(function: Callable[..., Any], draw: np.random.Generator) -> Callable[..., Any]:
    """Return the function with noise in the last bits of what it returns."""

    def noisy(*args: Any, **options: Any) -> Any:
        exact = function(*args, **options)
        return exact * (1 + 1e-15 * draw.standard_normal(np.shape(exact)))

    return noisy


@pytest.mark.parametrize("question", [None, "deadline"])
def test_noise_in_last_bits_changes_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str | None
) -> None:
    table = made_up_table(tmp_path / "table", 2)
    search = Search(Problem(table, load_table(table).groups[0].name), question=question)
    probes = search.probes()
    assert len(probes) > 3
    draw = np.random.default_rng(0)
    for module in (gaussian_process, kernel):
        for name in ("cholesky", "cho_solve", "solve_triangular"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, blurred(getattr(module, name), draw))
    assert search.probes() == probes


def test_there_are_fifty_searches_with_names_of_their_own(tmp_path: Path) -> None:
    every = list(searches(tmp_path))
    assert len({each.name for each in every}) == len(every) == 50
    assert [each.name for each in searches(tmp_path)] == [each.name for each in every]


def test_searches_that_differ_are_named_with_the_first_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = {"a": ["x", "y", "end"]}
    by_cpu = {
        "Prescott": {**same, "b": ["x", "y", "end"], "c": ["x", "end"]},
        "Haswell": {**same, "b": ["x", "z", "end"], "c": ["x", "end"]},
        "SkylakeX": {**same, "b": ["x", "y", "end"], "c": ["x", "y", "end"]},
    }
    assert differing(by_cpu) == ["b", "c"]
    printed = capsys.readouterr().out
    assert "Haswell differs from Prescott from step 1 on" in printed
    assert "SkylakeX differs from Prescott from step 1 on" in printed


def test_a_cpu_that_cannot_run_the_kernels_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ends = tmp_path / "python"
    ends.write_text("#!/bin/sh\nkill -ILL $$\n")
    ends.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(ends))
    assert probes_on(next(iter(CPUS)), []) is None
    assert "cannot run its kernels" in capsys.readouterr().out
