"""The benchmark of coverage: its truths, its noise, and how it judges an answer."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.coverage import judge, study
from benchmarks.noisy_cluster import Noise, NoisyRunner, flat_truth, made_up_truth
from tuner.answer.parts import Interval
from tuner.workload.records.probe import ProbeRequest


def test_windows_of_one_launch_share_its_effect() -> None:
    truth = made_up_truth(0)
    launch = truth.baseline.launch
    lives = tuple(c.live for c in truth.figures if c.launch == launch)
    runner = NoisyRunner(truth, Noise(0.05), seed=1)
    off = []
    for number in range(30):
        record = runner.run(ProbeRequest(f"p{number:04d}", launch, lives))
        assert len(record.measurements) == len(lives) + 1  # the first one again
        figures = [truth.figures[c] for c in (*record.request.configurations(), truth.baseline)]
        pairs = zip(record.measurements, figures, strict=True)
        off.append([math.log(m.step_time_s / seconds) for m, (seconds, _) in pairs])
    within, between = np.std(off, axis=1).mean(), np.std(np.mean(off, axis=1))
    assert within < 0.01
    assert between == pytest.approx(0.05, rel=0.4)
    again = runner.run(ProbeRequest("p0000", launch, lives[:2]))
    first = runner.run(ProbeRequest("p0000", launch, lives))
    assert again.measurements[:2] == first.measurements[:2]


def test_a_study_is_judged_by_the_truth_it_cannot_see() -> None:
    truth = made_up_truth(1)
    result = study(truth, Noise(0.01), seed=1, probes=14)
    found = judge(truth, result)
    assert len(found.energy) == len(found.time) == len(result.points)
    assert len(found.on_front) == len(result.points) + len(result.predicted)
    assert any(found.on_front)
    assert not all(found.on_front)
    nothing = Interval(0.0, 1e-12)
    wrong = []
    for point in result.points:
        assert point.estimate is not None
        wrong.append(replace(point, estimate=point.estimate._replace(time_interval_s=nothing)))
    assert not any(judge(truth, replace(result, points=tuple(wrong))).time)


def test_a_choice_among_equals_is_no_better() -> None:
    truth = flat_truth(4)
    found = judge(truth, study(truth, Noise(0.01), seed=3, probes=14))
    assert not any(found.truly_better)
