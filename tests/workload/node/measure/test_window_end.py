"""Windows that end early: only what is shown to be beaten, with its error in the record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.workload.node.measure.test_window import POLICY, Scene, noise
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement, reached
from tuner.workload.node.measure.statistics import FIRST_LOOK_S, Window, beaten_by
from tuner.workload.node.meters.base import Reading
from tuner.workload.records.probe import Measurement, PowerSample, ProbeRequest, WindowPolicy

#: A step takes 0.25 s and 75 J in every scene below.
FAST, FRUGAL, WORSE = (0.1, 40.0), (0.3, 30.0), (0.5, 200.0)


def run(
    competitors: Sequence[tuple[float, float]],
    scatter: float = 0.03,
    policy: WindowPolicy = POLICY,
) -> Window:
    step, power = noise(scatter), noise(scatter, seed=1)
    scene = Scene(
        lambda n: 0.25 * abs(step(n)), lambda now_s: 300.0 * abs(power(round(now_s / 0.1)))
    )
    return scene.conductor.measure(
        scene.meter, policy, 0.25, samples=scene.meter.samples, competitors=competitors
    )


def test_a_window_that_is_beaten_on_both_axes_ends_at_its_first_look() -> None:
    window = run([FAST])
    assert FIRST_LOOK_S <= window.length_s < 3.0
    assert window.beaten_by == FAST


@pytest.mark.parametrize("competitors", [[FRUGAL], [WORSE], [(0.249, 74.8)], []])
def test_what_may_be_on_the_front_is_measured_to_its_target(
    competitors: list[tuple[float, float]],
) -> None:
    window = run(competitors)
    assert window.length_s >= POLICY.min_s
    assert window.beaten_by is None
    assert window.step_time_se_s <= 1.1 * POLICY.target_se * 0.25


def test_a_window_that_is_complete_at_its_first_look_did_not_end_early() -> None:
    """It is as exact as was asked for, whatever beats it."""
    policy = replace(POLICY, min_s=FIRST_LOOK_S, target_se=0.1)
    assert run([FAST], policy=policy).beaten_by is None


def test_scatter_that_hides_the_difference_prolongs_the_window() -> None:
    near = (0.21, 60.0)
    assert run([near], scatter=0.01).length_s < 3.0
    assert run([near], scatter=0.5).length_s > 4.0


def test_its_flag_says_why_it_ended_and_its_error_is_that_of_the_short_window() -> None:
    window = run([FAST], scatter=0.2)
    found = measurement(Settings(), window, POLICY)
    assert isinstance(found, Measurement)
    (flag,) = found.flags
    assert flag.startswith(f"ended after {window.length_s:.1f} s: another configuration needs")
    assert found.step_time_se_s >= window.step_time_se_s > 0.01 * found.step_time_s


def test_a_window_without_power_samples_does_not_end_early() -> None:
    scene = Scene()
    window = scene.conductor.measure(scene.meter, POLICY, 0.25, competitors=[FAST])
    assert window.length_s >= POLICY.min_s


def test_equal_configurations_are_rarely_called_beaten() -> None:
    """A window of correlated steps and power, looked at once, against its own true figures."""
    rng, called = np.random.default_rng(0), 0
    for _ in range(400):
        steps = 0.25 * np.exp(0.15 * rng.standard_normal(16))
        ends = 50.0 + np.cumsum(steps)
        samples = [
            PowerSample(50.05 + 0.1 * k, 300.0 * math.exp(0.08 * rng.standard_normal()))
            for k in range(int((ends[-1] - 50.0) * 10))
        ]
        window = Window(
            Reading(50.0, 0.0), Reading(ends[-1], 0.0), tuple(steps), tuple(ends), tuple(samples)
        )
        called += beaten_by(window, [(0.25, 75.0)]) is not None
    assert called <= 20


def test_what_a_measurement_reaches_is_the_upper_end_of_its_intervals() -> None:
    found = Measurement(Settings(), 10, 5.0, 0.5, 500.0, 100.0, step_time_se_s=0.005)
    assert reached(found) == (
        pytest.approx(0.5 * math.exp(0.01645), rel=1e-4),
        pytest.approx(50.0 * math.exp(0.01645), rel=1e-4),
    )


def test_a_request_keeps_the_front_in_json_and_older_ones_have_none() -> None:
    request = ProbeRequest("p0001", Settings(data_parallel=1), front=((0.5, 20.0), (0.4, 25.0)))
    assert ProbeRequest.from_json(request.to_json()) == request
    plain = ProbeRequest("p0001", Settings(data_parallel=1)).to_json()
    assert "front" not in plain
    assert ProbeRequest.from_json(plain).front == ()
