"""Intervals that hold what they claim, also where launches differ more than their windows tell."""

from __future__ import annotations

import math

import numpy as np

from tuner.results.posterior import Posterior
from tuner.results.state import points_of
from tuner.results.windows import Windows
from tuner.testing.studies import measured, record, request


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
        for point in points_of(Posterior.of(Windows.of(records)), 1):
            low, high = point.time_interval_s
            held += low <= 1.0 <= high
            total += 1
    assert 0.85 <= held / total <= 0.97
