"""Priors made of a recorded table, and in which way each is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.problems import Problem
from benchmarks.search.recorded_priors import HALF_FACTOR, WRONG
from benchmarks.search.truth import truth_of
from tuner.testing.studies import write_table


def predicted(problem: Problem, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the launch of each point, and log (time, power) of the truth and of the prior."""
    points = truth_of(problem).points
    prior = WRONG[kind](problem)
    assert prior is not None
    said = prior.predict([point.configuration for point in points])
    return (
        np.array([point.configuration.launch["shape"] for point in points]),
        np.log([(point.time_s, point.power_W) for point in points]),
        np.log(np.column_stack([said.step_time_s, said.power_W])),
    )


def test_a_mirrored_prior_ranks_the_launches_upside_down(tmp_path: Path) -> None:
    problem = Problem(write_table(tmp_path / "table"), "made-up", jackknife=1)
    shapes, truth, said = predicted(problem, "mirrored")
    levels = np.array([truth[shapes == one].mean(axis=0) for one in np.unique(shapes)])
    mirrored = np.array([said[shapes == one].mean(axis=0) for one in np.unique(shapes)])
    assert mirrored - levels.mean(axis=0) == pytest.approx(levels.mean(axis=0) - levels)
    for one in np.unique(shapes):  # the curve over the live settings is the truth
        moved = (said - truth)[shapes == one]
        assert moved == pytest.approx(np.tile(moved[0], (len(moved), 1)))


def test_half_of_the_launches_are_off_each_way_once_in_four_tables(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "table")
    seen = set()
    for jackknife in range(4):
        shapes, truth, said = predicted(Problem(folder, "made-up", jackknife), "half-wrong")
        off = said - truth
        assert off[:, 1] == pytest.approx(0.0)
        wrong = np.abs(off[:, 0]) > 1e-9
        assert np.abs(off[wrong, 0]) == pytest.approx(np.log(HALF_FACTOR))
        assert len(np.unique(shapes[wrong])) == pytest.approx(len(np.unique(shapes)) / 2, abs=0.5)
        upper = shapes[wrong].min() > shapes[~wrong].min()
        edge = (shapes[~wrong].max(), shapes[wrong].min())
        assert edge[0] < edge[1] if upper else edge[0] > edge[1]
        seen.add((bool(upper), bool(off[wrong, 0][0] > 0)))
    assert len(seen) == 4
