"""Searches of a few probes: they spare none for a start that spreads, and end in an answer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection
from dataclasses import replace

import pytest

import tuner
from benchmarks.noisy_cluster import Noise, NoisyRunner, Truth
from tests.search.test_crash_causes import ERROR, EVERY, records_of
from tests.support.studies import METER, measured
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.problem import ProbeCost
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.study.request import StudyRequest
from tuner.study.session import Session
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace


@pytest.mark.parametrize(("probes_left", "spreads"), [(3, False), (6, False), (7, True)])
def test_a_start_that_spreads_takes_a_quarter_of_the_probes_at_most(
    probes_left: float, spreads: bool
) -> None:
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=m, clock_MHz=c)
        for m in range(1, 31)
        for c in (600, 1000, 1400)
    )
    first = candidates.configurations[2]
    request = ProbeRequest("p0000", first.launch, (first.live,))
    record = ProbeRecord(request, (measured(first.live, time_s=1.0, power_W=200.0),), METER)
    planner = CandidatePlanner(candidates, seed=0)
    plan = planner.plan(PlanningState((record,), probes_left=probes_left))
    assert plan is not None
    assert (plan.reason == "space-filling start") == spreads


def test_of_few_probes_none_goes_to_the_one_value_that_crashed() -> None:
    candidates = Candidates.from_configurations(EVERY)
    records = records_of((0, None), (3, ERROR))
    while len(records) < 4:
        planner = CandidatePlanner(candidates, seed=0)
        plan = planner.plan(PlanningState(records, probes_left=4 - len(records)))
        assert plan is not None
        assert plan.launch["data_parallel"] == 1
        records = [*records, *records_of((EVERY.index(plan.configurations[0]), None))]


@pytest.mark.parametrize(
    ("today", "then"), [((6, 900), (16, 900)), ((16, 900), (48, 900)), ((48, 1400), (48, 900))]
)
def test_without_models_twice_the_micro_batch_is_tried_or_the_middle_setting(
    today: tuple[int, int], then: tuple[int, int]
) -> None:
    candidates = Candidates.from_configurations(
        Configuration.of(data_parallel=r, micro_batch=m, clock_MHz=c)
        for r in (1, 2)
        for m in (1, 3, 6, 8, 16, 48)
        for c in (600, 900, 1400)
    )
    first = Configuration.of(data_parallel=1, micro_batch=today[0], clock_MHz=today[1])
    request = ProbeRequest("p0000", first.launch, (first.live,))
    record = ProbeRecord(request, (measured(first.live, time_s=1.0, power_W=200.0),), METER)
    planner = CandidatePlanner(candidates, seed=0)
    plan = planner.plan(PlanningState((record,), probes_left=4))
    assert plan is not None
    batch, clock_MHz = then
    assert plan.configurations == (
        Configuration.of(data_parallel=1, micro_batch=batch, clock_MHz=clock_MHz),
    )


def test_the_last_probes_do_not_leave_a_launch_whose_windows_take_hours() -> None:
    """What such a search has few of is launches, however much longer a window takes than one."""
    candidates = Candidates.from_configurations(
        Configuration.of(micro_batch=m, clock_MHz=c)
        for m in (1, 2, 4, 8, 16, 32)
        for c in (600, 800, 1000, 1200, 1400)
    )
    records = []
    for number, (batch, clock, time_s) in enumerate([(32, 1400, 6000.0), (32, 1000, 6500.0)]):
        tried = Configuration.of(micro_batch=batch, clock_MHz=clock)
        request = ProbeRequest(f"p{number:04d}", tried.launch, (tried.live,), extendable=True)
        window = measured(tried.live, time_s=time_s, power_W=float(clock) / 6)
        records.append(ProbeRecord(request, (window,), METER))
    cost = ProbeCost(launch_s=30.0, min_steps=24)
    leaves = {}
    for probes_left in (0, 1, math.inf):
        planner = CandidatePlanner(candidates, seed=0)
        state = PlanningState(records[:1], cost=cost, probes_left=probes_left)
        leaves[probes_left] = planner.plan_continuation(state, records[1]) is None
    assert leaves == {0: False, 1: False, math.inf: True}


class CrashingRunner(NoisyRunner):
    """A runner on which some launches crash, always at the same place."""

    def __init__(self, truth: Truth, crashes: Collection[Settings]) -> None:
        super().__init__(truth, Noise(0.01), seed=0)
        self._crashes = crashes

    def run(self, request: ProbeRequest) -> ProbeRecord:
        if request.launch not in self._crashes:
            return super().run(request)
        failure = Failure("crash", "RuntimeError: no NCCL", frames=("torch/distributed.py:init",))
        return ProbeRecord(request, (), METER, failure)


def search(
    truth: Truth, probes: int, *, steps: int = 1, crashes: Collection[Settings] = ()
) -> tuple[float, int]:
    """Search for the least energy; return the share of the best gain, and repeated crashes."""

    def saving(configuration: Configuration) -> float:
        both = (truth.baseline, configuration)
        times, powers = zip(*(truth.figures[c] for c in both), strict=True)
        return math.log(times[0] / times[1]) + math.log(powers[0] / powers[1])

    executor = SimulatedExecutor(CrashingRunner(truth, crashes))
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.named(folder, "study")
        settings = SearchSettings(max_probes=probes, seed=0)
        request = StudyRequest(search=settings, constraints=Constraints(objective="energy"))
        problem = replace(truth.problem(), steps=steps)
        result = Session(problem, lambda announce: executor, request, run=run).run()
        records = read_trace(run.trace).records
    advice = result.recommendation
    assert advice is not None
    named = advice.point if advice.action == "train" else advice.promising
    found = 0.0 if named is None else saving(named.configuration)
    best = max(saving(c) for c in truth.figures if c.launch not in crashes)
    return found / best, max(0, sum(record.failure is not None for record in records) - 1)


def test_nano_gpt_finds_its_gain_in_three_and_four_probes() -> None:
    """By two measured launches of 96 sequences on two cores, on both of which it crashes."""
    (few, few_s), (many, many_s) = (12, 13.6), (96, 4.5)
    each_s = (few_s - many_s) / (96 / few - 96 / many)
    launches = [
        Configuration.of(data_parallel=ranks, micro_batch=size)
        for ranks in (1, 2)
        for size in range(1, 97)
        if 96 % (ranks * size) == 0
    ]
    launches.sort(key=lambda c: (c.world_size, c.micro_batch != few))
    times_s = {c: many_s + each_s * (96 / c.micro_batch - 1) for c in launches}
    truth = Truth("nanoGPT", {c: (time_s, 100.0) for c, time_s in times_s.items()})
    crashes = {c.launch for c in launches if c.world_size > 1}
    for probes in (3, 4):
        share, repeated = search(truth, probes, steps=10**7, crashes=crashes)
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
    share, _ = search(Truth("made up", figures), 4)
    assert share >= 0.5


@pytest.mark.slow
@pytest.mark.extra("tuner.models.job_prior", "tuner.search_spaces.model_reading")
@pytest.mark.parametrize("seed", range(3))
def test_eight_probes_with_models_sweep_the_clocks_of_todays_launch(tmp_path, seed: int) -> None:
    """They are 95 % likely to be on the front, by the search's own statement."""
    result = tuner.optimize(
        "qwen2.5-7b",
        cluster="a100-8",
        executor="simulated",
        search=SearchSettings(max_probes=8, seed=seed),
        runs_dir=tmp_path,
        report=False,
    )
    records = read_trace(RunFolder(result.run_dir).trace).records
    today = records[0].request.launch
    visited = [m.live for r in records if r.request.launch == today for m in r.measurements]
    assert len(set(visited)) >= 3
