"""What was never measured and may be on the front."""

from __future__ import annotations

import numpy as np
import pytest

import tuner
from tuner.testing.studies import run_replay, table_point, write_table


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


def test_predicted_intervals_hold_the_truth_about_as_often_as_they_say(replayed) -> None:
    figures = truth()
    inside = []
    for point in replayed.predicted:
        where = point.configuration.get("shape"), point.configuration.get("speed")
        time_s, energy_kJ = figures[where]
        for value, (low, high) in (
            (time_s, point.time_interval_s),
            (energy_kJ, point.energy_interval_kJ),
        ):
            inside.append(low <= value <= high)
    assert np.mean(inside) >= 0.6


def test_a_loaded_result_predicts_the_same(replayed) -> None:
    again = tuner.load_result(replayed.run_dir)
    assert [p.configuration for p in again.predicted] == [
        p.configuration for p in replayed.predicted
    ]
    assert again.points == replayed.points
