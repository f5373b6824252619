"""Searches of a few probes: what they try first, and that they end in an answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.noisy_cluster import Truth
from benchmarks.small_searches import Case, cases, search
from tests.search.test_crash_causes import ERROR, EVERY, records_of
from tests.support.studies import METER, measured, problem_of_job
from tuner.problem.problem import Problem
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search.small_search import SmallSearchPlanner, first_of_few
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest


def problem_of(configurations: list[Configuration]) -> Problem:
    return Truth("made up", dict.fromkeys(configurations, (1.0, 100.0))).problem()


def test_without_models_the_micro_batch_is_doubled_and_all_else_is_todays() -> None:
    sizes = (6, 1, 2, 3, 4, 8, 16, 48)
    today, *_ = every = [
        Configuration.of(data_parallel=ranks, micro_batch=size)
        for ranks in (1, 2)
        for size in sizes
    ]
    larger = tuple(replace_batch(today, size) for size in (16, 48))
    assert first_of_few(problem_of(every), "knee") == larger
    assert first_of_few(problem_of([c for c in every if c.micro_batch <= 8]), "knee") == ()


def replace_batch(configuration: Configuration, size: int) -> Configuration:
    launch = {**configuration.launch, "micro_batch": size}
    return Configuration.of(**launch, **configuration.live)


@pytest.mark.parametrize("objective", ["knee", "time", "energy"])
def test_with_models_it_is_what_they_expect_to_save_most(objective: str) -> None:
    problem = problem_of_job("opt-350m", "a100-8", "default")
    [first] = first_of_few(problem, objective)
    assert problem.prior is not None
    assert problem.baseline is not None
    predicted = problem.prior.predict([problem.baseline, first])
    assert problem.device_memory_bytes is not None
    assert float(predicted.memory_bytes[1]) < problem.device_memory_bytes
    time, energy = predicted.step_time_s, predicted.step_time_s * predicted.power_W
    saved = {"knee": energy * time, "time": time, "energy": energy}[objective]
    assert saved[1] < saved[0]


def test_what_hardly_fits_is_not_tried_first() -> None:
    problem = problem_of_job("opt-350m", "a100-8", "default")
    assert problem.cluster is not None
    device = replace(problem.cluster.device, memory_bytes=problem.cluster.device.memory_bytes // 8)
    small = replace(problem, cluster=replace(problem.cluster, device=device))
    assert small.prior is not None
    for first in first_of_few(small, "knee"):
        needed = float(small.prior.predict([first]).memory_bytes[0])
        assert needed < (small.device_memory_bytes or math.inf)


@pytest.mark.parametrize("few_probes", [True, False])
def test_few_probes_measure_the_settings_of_the_first_launch_before_it_ends(
    few_probes: bool,
) -> None:
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=m, clock_MHz=c)
        for m in range(1, 31)
        for c in (600, 1000, 1400)
    )
    first = candidates.configurations[2]
    request = ProbeRequest("p0000", first.launch, (first.live,))
    record = ProbeRecord(request, (measured(first.live, time_s=1.0, power_W=200.0),), METER)
    planner = (
        SmallSearchPlanner(candidates, tries=(), seed=0)
        if few_probes
        else CandidatePlanner(candidates, seed=0)
    )
    plan = planner.plan_continuation(PlanningState(), record)
    assert (plan is not None and plan.launch == first.launch) == few_probes


@pytest.mark.parametrize("launches", [1, 2])
def test_a_launch_that_promises_little_is_ended_only_for_another(
    launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.search.small_search.DEAR", 0.0)
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=m, clock_MHz=c)
        for m in range(1, launches + 1)
        for c in (600, 1000, 1400)
    )
    first = candidates.configurations[0]
    request = ProbeRequest("p0000", first.launch, (first.live,))
    record = ProbeRecord(request, (measured(first.live, time_s=1.0, power_W=200.0),), METER)
    planner = SmallSearchPlanner(candidates, tries=(), seed=0)
    plan = planner.plan_continuation(PlanningState(), record)
    assert (plan is not None) == (launches == 1)


def test_of_few_probes_none_goes_to_the_one_value_that_crashed() -> None:
    candidates = Candidates.from_configurations(EVERY)
    records = records_of((0, None), (3, ERROR))
    while len(records) < 4:
        planner = SmallSearchPlanner(candidates, tries=(), seed=0)
        plan = planner.plan(PlanningState(records))
        assert plan is not None
        assert plan.launch["data_parallel"] == 1
        records = [*records, *records_of((EVERY.index(plan.configurations[0]), None))]


def test_after_a_doubled_micro_batch_without_memory_no_larger_one_is_tried() -> None:
    today, *_ = every = [Configuration.of(micro_batch=size) for size in (8, 1, 2, 4, 16, 32, 64)]
    tries = first_of_few(problem_of(every), "knee")
    assert [each.micro_batch for each in tries] == [16, 32, 64]
    both = enumerate((today, tries[0]))
    requests = [ProbeRequest(f"p{n:04}", c.launch, (c.live,)) for n, c in both]
    full = Failure("out_of_memory", "CUDA out of memory")
    records = (
        ProbeRecord(requests[0], (measured(today.live, time_s=1.0, power_W=200.0),), METER),
        ProbeRecord(requests[1], (), METER, full),
    )
    planner = SmallSearchPlanner(Candidates.from_configurations(every), tries=tries, seed=0)
    plan = planner.plan(PlanningState(records))
    assert plan is not None
    assert int(plan.launch["micro_batch"]) < 8


def case_of(truth: Truth) -> Case:
    return Case(truth, truth.problem())


def test_nano_gpt_finds_its_gain_in_three_and_four_probes() -> None:
    *_, case = cases(None)
    assert case.truth.name == "nanoGPT"
    for probes in (3, 4):
        share, repeated = search(case, probes, 0)
        assert share >= 0.5
        assert repeated == 0


@pytest.mark.parametrize("best", [2, 32])
def test_where_a_larger_micro_batch_is_slower_four_probes_find_the_smaller(best: int) -> None:
    # The first try is wrong for the smaller one.
    sizes = (8, 1, 2, 4, 16, 32, 64)
    figures = {
        Configuration.of(micro_batch=size): (1 + 0.25 * abs(math.log2(size / best)), 200.0)
        for size in sizes
    }
    share, _ = search(case_of(Truth("made up", figures)), 4, 0)
    assert share >= 0.5
