"""Differences in words, paired series, and the comparison of two points of a result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.answer.test_judge import judge_of, searched
from tests.answer.test_posterior import configuration
from tests.answer.test_recommendation import point, result_of
from tuner.answer.judge import Judge
from tuner.answer.parts import Difference
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.records.probe import MeterInfo


def test_a_difference_that_is_not_shown_is_not_called_one() -> None:
    unclear = Difference("step_time", -0.01, -0.03, 0.01, 0.3, "the test")
    assert unclear.sentence.startswith("step time: no difference shown; if any, within [-3.00")
    shown = Difference("energy_per_step", -0.2, -0.21, -0.19, 1e-9, "the test")
    assert shown.sentence.startswith("energy per step: 20.00 % less, [-21.00, -19.00] %")
    assert "p < 0.0001" in shown.sentence


def test_a_result_compares_its_points_by_name() -> None:
    result = result_of(judge_of(searched(np.random.default_rng(1), 0.3)))
    there = result.compare()
    assert there.b == result.best.configuration.short
    assert there.energy.relative == pytest.approx(-0.3, abs=0.04)
    assert "3 and 1 of them of these two" in there.lines()[-1]
    back = result.compare(result.best.configuration, "baseline")
    assert back.energy.relative == pytest.approx(1 / (1 + there.energy.relative) - 1)
    assert back.step_time.p_value == pytest.approx(there.step_time.p_value)
    others = result.compare(configuration(1), configuration(2))
    assert others.step_time.low < others.step_time.relative < others.step_time.high
    with pytest.raises(UnknownName, match="today"):
        result.compare("nothing")
    with pytest.raises(InputError, match="are the same configuration; name two"):
        result.compare("baseline", "baseline")


def test_two_scopes_are_not_compared() -> None:
    result = result_of(judge_of(searched(np.random.default_rng(1), 0.3)))
    meter = MeterInfo("nvml", "module", "NVML")
    other = point(configuration(1), 5.0, 50.0, meter=meter)
    judge = Judge([result.baseline, other], result.baseline, result.judge.constraints, 100)
    mixed = result_of(judge, windows=result.windows)
    with pytest.raises(InputError, match="energies of two scopes"):
        mixed.compare("baseline", configuration(1))


def test_a_prediction_has_no_p_value() -> None:
    measured = Difference("step_time", -0.03, -0.09, 0.03, 0.31, "intervals of the points")
    assert "p = 0.31" in measured.sentence
    assert measured.to_json()["p_value"] == 0.31
    predicted = replace(measured, predicted=True)
    assert predicted.sentence == "step time: 3.0 % less (-9 to +3 %), predicted"
    assert predicted.to_json()["p_value"] is None
