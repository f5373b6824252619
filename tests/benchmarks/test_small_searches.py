"""Searches of a few probes: what counts as the gain."""

from __future__ import annotations

import math

import pytest

from benchmarks.noisy_cluster import Truth
from benchmarks.small_searches import Case, cases, search
from tuner.search_spaces.configuration import Configuration


def test_the_gain_is_the_best_energy_of_what_trains() -> None:
    *_, case = cases(None)
    assert case.truth.name == "nanoGPT"
    assert case.truth.baseline == Configuration.of(data_parallel=1, micro_batch=12)
    assert case.best == pytest.approx(math.log(13.6 / 4.5))
    assert {launch["data_parallel"] for launch in case.crashes} == {2}


def test_the_only_other_configuration_is_all_of_the_gain() -> None:
    today, other = (Configuration.of(micro_batch=size) for size in (1, 2))
    truth = Truth("made up", {today: (1.0, 100.0), other: (0.4, 100.0)})
    share, repeated = search(Case(truth, truth.problem()), 3, 0)
    assert share == pytest.approx(1.0)
    assert repeated == 0
