"""Where the true front lies, and what was never measured and may be on it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tuner
from tests.support.studies import run_replay, table_point, write_table
from tuner.answer.posterior import attainment_of
from tuner.pareto import nondominated


def test_without_error_the_band_is_the_front_itself() -> None:
    time, energy = np.log([[1.0, 2.0, 4.0, 3.0]]), np.log([[8.0, 4.0, 2.0, 9.0]])
    band = attainment_of(np.repeat(energy, 50, 0), np.repeat(time, 50, 0), steps=1000)
    assert band.draws == 50
    assert band.energy_kJ_10 == band.energy_kJ_50 == band.energy_kJ_90
    for time_s, energy_kJ in zip(band.time_s, band.energy_kJ_50, strict=True):
        step_s = time_s / 1000
        # Rounding may put the grid's end a hair beside the last corner.
        expected = {8.0: step_s < 2, 4.0: 2 <= step_s < 4 - 1e-9, 2.0: step_s >= 4 - 1e-9}
        assert energy_kJ in [pytest.approx(e) for e, holds in expected.items() if holds]


def test_the_surfaces_are_quantiles_of_what_is_attained() -> None:
    """One point whose energy is uncertain: 90 % of draws attain its 90 % quantile."""
    rng = np.random.default_rng(0)
    energy = rng.normal(0.0, 0.1, (4000, 1))
    band = attainment_of(energy, np.zeros((4000, 1)), steps=1)
    for surface, quantile in (
        (band.energy_kJ_10, -1.2816),
        (band.energy_kJ_50, 0.0),
        (band.energy_kJ_90, 1.2816),
    ):
        assert math.log(1000 * surface[-1]) == pytest.approx(0.1 * quantile, abs=0.01)


def test_nothing_is_attained_before_anything_is_done() -> None:
    rng = np.random.default_rng(1)
    time = rng.normal(0.0, 0.1, (1000, 1))
    band = attainment_of(np.zeros((1000, 1)), time, steps=1)
    assert math.isinf(band.energy_kJ_90[0])
    assert band.energy_kJ_90[-1] == pytest.approx(1e-3)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return run_replay(
        write_table(folder / "t"), runs_dir=folder / "runs", report=False, max_probes=4
    )


def truth() -> dict[tuple[int, int], tuple[float, float]]:
    """(time s, energy kJ) of every point of the table."""
    return {
        (shape, speed): (time_s, time_s * power_W / 1000)
        for shape in (1, 2, 3, 4, 6, 8)
        for speed in range(1, 6)
        for time_s, power_W in [table_point(shape, speed)]
    }


def test_predicted_points_are_marked_and_never_mixed_in(replayed) -> None:
    assert replayed.predicted
    measured = {point.configuration for point in replayed.points}
    for point in replayed.predicted:
        assert point.source == "predicted"
        assert point.windows == 0
        assert point.how_measured.startswith("predicted")
        assert 0.3 <= point.p_nondominated <= 1
        assert point.configuration not in measured
    assert replayed.best.source == "measured"
    assert all(point.source == "measured" for point in replayed.front_points)
    times = [point.time_to_solution_s for point in replayed.predicted]
    assert times == sorted(times)


def test_predicted_intervals_hold_the_truth_about_as_often_as_they_say(replayed, tmp_path) -> None:
    """Over several tables and lengths: the points of one launch are in or out together."""
    figures = truth()
    results = [replayed]
    for shapes in ((1, 2, 4, 8), (2, 3, 4, 6, 8), (1, 4, 6, 8)):
        for probes in (1, 2, 3):
            folder = tmp_path / f"{shapes} {probes}"
            table = write_table(folder / "t", shapes=shapes)
            results.append(
                run_replay(table, runs_dir=folder / "runs", report=False, max_probes=probes)
            )
    inside = []
    for point in (point for result in results for point in result.predicted):
        where = point.configuration.get("shape"), point.configuration.get("speed")
        time_s, energy_kJ = figures[where]
        for value, (low, high) in (
            (time_s, point.time_interval_s),
            (energy_kJ, point.energy_interval_kJ),
        ):
            inside.append(low <= value <= high)
    assert len(inside) >= 20
    assert np.mean(inside) >= 0.8


def test_once_the_search_has_converged_the_band_holds_the_true_front(tmp_path) -> None:
    """After 8 probes of 30 points; after 4 the surrogates know too little, and so does the band."""
    result = run_replay(
        write_table(tmp_path / "t"), runs_dir=tmp_path / "runs", report=False, max_probes=8
    )
    band, figures = result.attainment, np.array(list(truth().values()))
    front = figures[nondominated(figures[:, 1], figures[:, 0])]
    inside = []
    for time_s, low, high in zip(band.time_s, band.energy_kJ_10, band.energy_kJ_90, strict=True):
        done = front[front[:, 0] <= time_s, 1]
        if len(done) and math.isfinite(high):
            inside.append(low <= done.min() <= high)
    assert np.mean(inside) >= 0.8
    for low, middle, high in zip(
        band.energy_kJ_10, band.energy_kJ_50, band.energy_kJ_90, strict=True
    ):
        assert low <= middle <= high


def test_a_loaded_result_predicts_the_same(replayed) -> None:
    again = tuner.load_result(replayed.run_dir)
    assert [p.configuration for p in again.predicted] == [
        p.configuration for p in replayed.predicted
    ]
    assert again.attainment == replayed.attainment
