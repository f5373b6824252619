"""Models that a few measured launches corrected."""

from __future__ import annotations

from dataclasses import replace

from tuner.models.analytic.constants import constants_of
from tuner.models.scale_out import predictor
from tuner.planner.evaluate import correction
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job

JOB, CLUSTER = load_job("opt-350m"), load_cluster("a100-8")
#: A program that dispatches three times as slowly as the prior.
TRUE = replace(constants_of(CLUSTER.device), operator_s=3 * constants_of(CLUSTER.device).operator_s)


def test_one_launch_corrects_what_it_did_not_show() -> None:
    measured = [Configuration.parse("dp8 mb1 zero0")]
    logs = predictor(JOB, CLUSTER, measured)(TRUE)
    found = correction(JOB, CLUSTER, measured, logs, ["one"])
    assert found.launches == 1
    for words in ("dp4 tp2 mb1 zero0", "dp8 mb2 zero0", "dp2 tp4 mb2 zero0"):
        predict = predictor(JOB, CLUSTER, [Configuration.parse(words)])
        corrected = predict(found.constants)[0, 0] + found.log_time
        plain = predict(constants_of(CLUSTER.device))[0, 0]
        truth = predict(TRUE)[0, 0]
        assert abs(corrected - truth) < 0.12
        assert abs(corrected - truth) < abs(plain - truth) / 3
