"""The benchmark of windows that end early, on the conductor of real probes."""

from __future__ import annotations

import pytest

from benchmarks.noisy_cluster import made_up_truth
from benchmarks.windows import Scatter, WindowRunner, energy_ratio, search
from tuner.workload.probe import ProbeRequest


def test_the_error_of_a_window_falls_with_its_length_and_a_beaten_one_is_short() -> None:
    truth = made_up_truth(0)
    seconds, watts = truth.figures[truth.baseline]
    request = ProbeRequest("p0001", truth.baseline.launch, (truth.baseline.live,))
    runner = WindowRunner(truth, Scatter(), early=True, seed=1)
    (long,) = runner.run(request).measurements
    beaten = ProbeRequest(
        "p0001", request.launch, request.live, front=((0.4 * seconds, 0.4 * seconds * watts),)
    )
    (short,) = runner.run(beaten).measurements
    assert short.window_s < 5.0 < long.window_s
    assert short.step_time_rse > 1.3 * long.step_time_rse
    never = WindowRunner(truth, Scatter(), early=False, seed=1)
    assert never.run(beaten).measurements[0].window_s == long.window_s


def test_a_search_is_compared_with_the_truth() -> None:
    found = search(made_up_truth(1), Scatter(), early=True, seed=0, probes=4)
    assert len(found.curve) <= 4
    assert len(found.held) >= 2 * 3
    assert found.joules_to(1.0) == found.curve[0][0]
    assert energy_ratio([(found, found)]) == pytest.approx(1.0)
