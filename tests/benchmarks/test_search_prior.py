"""The benchmark of priors: exact and wrong on recorded tables, wrong on simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.names import OURS
from benchmarks.search.prior import main
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.samplers import WITH_TRUTH
from benchmarks.search.truth import truth_of
from tuner.testing.studies import write_table


def test_the_truth_predicts_its_own_means(tmp_path: Path) -> None:
    truth = truth_of(Problem(write_table(tmp_path / "table"), "made-up"))
    some = [truth.points[i] for i in (7, 2)]
    said = truth.predict([point.configuration for point in some])
    assert said.step_time_s == pytest.approx([point.time_s for point in some])
    assert said.power_W == pytest.approx([point.power_W for point in some])
    assert np.array_equal(said.memory_bytes, np.zeros(2))


def test_a_search_that_knows_the_truth_pays_less(tmp_path: Path) -> None:
    problem = Problem(write_table(tmp_path / "table"), "made-up")
    kJ = {name: sum(run(problem, name, s).kJ for s in range(3)) for name in (OURS, WITH_TRUTH)}
    assert kJ[WITH_TRUTH] < kJ[OURS]


@pytest.mark.long
def test_the_command_prints_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write_table(tmp_path / "table"), tmp_path / "figures.json"
    main(
        [str(table), "--jackknife", "1", "--simulated", "1", "--launches", "6", "--json", str(out)]
    )
    figures = {figure["name"]: figure["value"] for figure in json.loads(out.read_text())}
    assert set(figures) == {
        "perfect_prior_over_oracle_held_out",
        "wrong_prior_joules_ratio_mirrored_held_out",
        "wrong_prior_worst_ratio_mirrored_held_out",
        "wrong_prior_joules_ratio_half_wrong_held_out",
        "wrong_prior_worst_ratio_half_wrong_held_out",
        "models_prior_joules_ratio",
        "models_prior_worst_ratio",
    }
    assert figures["perfect_prior_over_oracle_held_out"] > 0.5
    assert 0 < figures["models_prior_joules_ratio"] <= figures["models_prior_worst_ratio"]
    assert "without" in capsys.readouterr().out
