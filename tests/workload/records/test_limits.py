"""Time limits of a probe: derived, set, and never shorter than the inspection's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.scripted_ranks import ScriptedClock, ScriptedRanks
from tuner.models.analytic.model import AnalyticModel
from tuner.problem.problem import probe_limits
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.records.probe import (
    FIRST_STEP_LIMIT_S,
    STEP_LIMIT_S,
    Failure,
    ProbeLimits,
    ProbeRequest,
    WindowPolicy,
    limits_of,
)
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

WINDOW = WindowPolicy()
SCRIPT = ScriptJob(
    name="mine", model={}, sequence_length=0, global_batch=8, steps=10, precision="fp32"
)


def test_without_any_knowledge_the_first_step_has_the_time_of_the_inspection() -> None:
    """A script that starts in 250 s passes the inspection and then every probe."""
    limits = limits_of(WINDOW)
    assert limits.first_step_s == FIRST_STEP_LIMIT_S == 300.0
    assert limits.step_s == STEP_LIMIT_S
    assert limits.probe_s > limits.first_step_s + WINDOW.max_s


def test_limits_follow_the_inspection_and_the_predicted_step() -> None:
    slow_start = limits_of(WINDOW, inspected_s=250.0)
    assert (slow_start.first_step_s, slow_start.step_s) == (750.0, 120.0)
    slow_steps = limits_of(WINDOW, predicted_step_s=300.0, visits=8)
    assert slow_steps.step_s == 3000.0
    assert slow_steps.first_step_s >= slow_steps.step_s
    # Each of eight windows needs three steps, and the warm-up some.
    assert slow_steps.probe_s > slow_steps.first_step_s + 8 * 3 * 300.0


def test_limits_that_are_set_are_taken() -> None:
    limits = limits_of(WINDOW, predicted_step_s=300.0, first_step_s=9.0, step_s=8.0, probe_s=7.0)
    assert limits == ProbeLimits(9.0, 8.0, 7.0)


def test_only_the_first_step_has_the_limit_of_a_start() -> None:
    """A script that sleeps 130 s before its first step is no hang; a later step is."""
    clock = ScriptedClock()
    ranks = ScriptedRanks(clock, lambda step: 130.0)
    conductor = Conductor(
        ranks, deadline_s=1e6, explain_exit=lambda rank, code: Failure("crash", ""), clock=clock
    )
    conductor.first_step()
    with pytest.raises(ProbeFailed, match="no optimizer step within 120 s, after 1 steps"):
        conductor.run(1)


def test_a_request_carries_its_limits_and_an_old_one_has_none() -> None:
    request = ProbeRequest("p", Settings(), first_step_limit_s=750.0, step_limit_s=130.0)
    assert ProbeRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    old = request.to_json()
    del old["first_step_limit_s"], old["step_limit_s"]
    again = ProbeRequest.from_json(old)
    assert again.limits() == ProbeLimits(300.0, 120.0, 300.0)
    assert request.limits(4.0) == ProbeLimits(4.0, 4.0, 300.0)


def test_a_72b_model_has_time_for_its_steps() -> None:
    job, cluster = load_job("lmm-72b"), load_cluster("h100-32")
    one = Configuration.of(data_parallel=8, zero_stage=3, parameter_offload="cpu")
    predicted = float(AnalyticModel(job, cluster).predict([one]).step_time_s[0])
    limits = probe_limits(job, AnalyticModel(job, cluster), [one], WINDOW)
    assert limits.step_s == max(120.0, 10 * predicted)
    assert limits.probe_s > limits.first_step_s + 3 * predicted


def test_the_inspections_time_is_no_part_of_the_job() -> None:
    looked = replace(SCRIPT, frame=ScriptFacts(kind="torch", first_step_s=17.0))
    again = ScriptJob.from_json(looked.to_json())
    assert again == looked
    assert again.frame.first_step_s == 0.0
    assert probe_limits(looked, None, [], WINDOW).first_step_s == 300.0


def test_settings_of_older_studies_keep_their_limit() -> None:
    assert SearchSettings(time_limit_s=300.0).time_limit_s == 300.0
    assert SearchSettings().with_default_limits(simulated=True).time_limit_s == 3600.0
