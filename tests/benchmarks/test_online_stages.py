"""Pipelines of the benchmark of stage clocks: times that can be reckoned by hand."""

from __future__ import annotations

import pytest

from benchmarks.online.stages import TOP, one_f_one_b, stage_figures, step


def test_1f1b_of_equal_stages_takes_its_micro_batches_and_a_bubble() -> None:
    # (m + p - 1) forward and backward passes: Narayanan et al. 2021, section 2.2.
    assert one_f_one_b([1.0, 1.0, 1.0], 8) == pytest.approx(3 * (8 + 3 - 1))
    assert one_f_one_b([1.0], 5) == pytest.approx(15)


def test_the_slowest_stage_alone_bounds_a_long_step() -> None:
    # Before its first pass one of 0.5, after its last one of 1.0, and the third stage's turn.
    assert 301.5 <= one_f_one_b([0.5, 1.0, 0.5], 100) <= 303


def test_a_step_at_half_the_clock_takes_twice_as_long_if_all_of_it_is_bound() -> None:
    time_s, energy_J = step([1.0, 1.0], [TOP / 2, TOP / 2], 1.0, 4)
    assert time_s == pytest.approx(2 * step([1.0, 1.0], [TOP, TOP], 1.0, 4)[0])
    assert energy_J < 2 * step([1.0, 1.0], [TOP, TOP], 1.0, 4)[1]


def test_no_choice_beats_the_oracle_of_its_own_time() -> None:
    figures = {figure.name: figure.value for figure in stage_figures(3)}
    assert 0 < figures["stages_saving_over_oracle"] <= 1
