"""Intervals that hold what they claim, also where launches differ more than their windows tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.studies import measured, record, request
from tuner.answer.posterior import LaunchPosterior, Windows
from tuner.answer.state import _peak_W, points_of


def test_ninety_per_cent_intervals_hold_the_truth_under_launch_noise():
    """Windows claim 1 %, launches differ by 5 %: about 90 % of intervals hold the truth."""
    rng = np.random.default_rng(1)
    held = 0
    total = 0
    for trial in range(60):
        records = []
        for number in range(4):
            for repeat in range(3):
                seconds = math.exp(rng.normal(0, 0.05) + rng.normal(0, 0.01))
                name = f"p{trial}-{number}-{repeat}"
                asked = request(name)
                launch = type(asked.launch)({**asked.launch, "micro_batch": number + 1})
                changed = type(asked)(name, launch)
                records.append(
                    record(name, request=changed, measurements=(measured(time_s=seconds),))
                )
        for point in points_of(LaunchPosterior.of(Windows.of(records)), 1):
            low, high = point.time_interval_s
            held += low <= 1.0 <= high
            total += 1
    assert 0.85 <= held / total <= 0.97


def test_the_peak_is_the_highest_sample_within_the_window(tmp_path):
    """Samples before the window (a launch) are no part of it; without samples nothing is said."""
    from dataclasses import replace

    from tuner.workload.records.probe import PowerSample
    from tuner.workload.records.trace import write_power_samples

    window = replace(measured(), started_s=10.0, window_s=5.0)
    windows = Windows.of([record("p0001", measurements=(window,)), record("p0002")])
    samples = [PowerSample(t, w) for t, w in ((2.0, 900.0), (11.0, 20.0), (14.0, 31.0), (16.0, 80))]
    write_power_samples(tmp_path, "p0001", samples)
    assert _peak_W(windows, [0], tmp_path) == pytest.approx(31.0)
    assert _peak_W(windows, [1], tmp_path) is None
    assert _peak_W(windows, [0], None) is None
