"""Plans of the planner, its observations of records, and a search that beats chance."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.studies import METER, measured, probe_with
from tests.support.traces import TRACES
from tuner.models.prior import Prediction
from tuner.pareto import hypervolume, reference_point
from tuner.problem.problem import ProbeCost
from tuner.search.candidate_planner import PROMISING, CandidatePlanner
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest

CANDIDATES = Candidates.from_configurations(
    Configuration.of(
        data_parallel=d, micro_batch=b, zero_stage=z, activation_checkpointing=a, clock_MHz=c
    )
    for d in (1, 2, 4)
    for b in (1, 2, 4)
    for z in (0, 1, 3)
    for a in ("none", "full")
    for c in (600, 800, 1000, 1200, 1400)
    if not (z == 3 and d == 1)
)


def truth(configuration: Configuration) -> tuple[float, float]:
    """(seconds, watts): a made-up machine with a trade-off in degree and clock."""
    d, b = configuration.data_parallel, configuration.micro_batch
    clock = configuration.get("clock_MHz")
    f = (1400 if clock is None else float(clock)) / 1400  # type: ignore[arg-type]
    seconds = 8 / d**0.7 * (0.3 + 0.7 / f) * (1 + 0.4 / b) * (1 + 0.08 * configuration.zero_stage)
    if configuration.get("activation_checkpointing") == "full":
        seconds *= 1.3
    return seconds, d * (90 + 240 * f**2.6)


def record_of(configuration: Configuration, failure: str = "") -> ProbeRecord:
    """Return the record of a probe of one configuration."""
    seconds, watts = truth(configuration)
    request = ProbeRequest("p0000", configuration.launch, (configuration.live,))
    if failure:
        return ProbeRecord(request, (), METER, Failure(failure, "as planned"))
    window = measured(configuration.live, time_s=seconds, power_W=watts)
    return ProbeRecord(request, (window,), METER)


def plan_of(
    planner: CandidatePlanner,
    records: list[ProbeRecord],
    in_flight: Sequence[Configuration] = (),
) -> ProbePlan:
    plan = planner.plan(PlanningState(tuple(records), tuple(in_flight)))
    assert plan is not None
    return plan


def probe(planner: CandidatePlanner, records: list[ProbeRecord]) -> ProbePlan:
    """Plan, and measure each setting of the plan in a probe of its own."""
    plan = plan_of(planner, records)
    records += [record_of(configuration) for configuration in plan.configurations]
    return plan


# -- plans ---------------------------------------------------------------------------------------


def test_the_start_spreads_over_launches_and_then_the_surrogates_choose() -> None:
    planner = CandidatePlanner(CANDIDATES, seed=0)  # of 48 launches, whose fourth root is 2
    records: list[ProbeRecord] = []
    start = [probe(planner, records) for _ in range(2)]
    assert len({plan.launch for plan in start}) == 2
    assert {plan.reason for plan in start} == {"space-filling start"}
    assert all(math.isinf(plan.expected_gain) for plan in start)
    assert all(1 <= len(plan.live) <= 3 for plan in start)
    later = probe(planner, records)
    assert later.reason == "expected improvement"
    assert later.expected_gain > 0
    assert later.score > 0
    assert later.cost_J > 0
    assert later.configurations == tuple(Configuration(later.launch, live) for live in later.live)


class Foretelling:
    """A prior that is wrong about each configuration by a constant factor."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        time, power = np.array([truth(each) for each in configurations]).T
        return Prediction(1.3 * time, 0.9 * power, np.zeros(len(time)))


def product(configuration: Configuration) -> float:
    time, power = truth(configuration)
    return math.log(time * power * time)


def test_with_a_prior_no_launch_is_started_that_it_ranks_behind_by_more_than_its_error() -> None:
    planner = CandidatePlanner(CANDIDATES, prior=Foretelling(), seed=0)
    today = max(CANDIDATES.configurations, key=product)
    records = [record_of(today)]
    second = probe(planner, records)
    assert second.reason == "space-filling start"
    of_second = (each for each in CANDIDATES.configurations if each.launch == second.launch)
    assert min(map(product, of_second)) < min(map(product, CANDIDATES.configurations)) + PROMISING
    assert probe(planner, records).reason == "expected improvement"


def test_before_anything_is_measured_launches_are_within_the_priors_error_of_the_best() -> None:
    planner = CandidatePlanner(CANDIDATES, prior=Foretelling(), seed=0)
    best = min(map(product, CANDIDATES.configurations))
    in_flight: list[Configuration] = []
    for _ in range(6):
        plan = plan_of(planner, [], in_flight)
        in_flight += plan.configurations
        launch = [each for each in CANDIDATES.configurations if each.launch == plan.launch]
        assert min(map(product, launch)) < best + PROMISING + 1e-6
    assert len({each.launch for each in in_flight}) == 6
    assert max(map(product, CANDIDATES.configurations)) > best + 2 * PROMISING


def proposed_until_the_end(
    planner: CandidatePlanner, records: list[ProbeRecord]
) -> list[Configuration]:
    proposed: list[Configuration] = []
    while (plan := planner.plan(PlanningState(tuple(records)))) is not None:
        proposed += plan.configurations
        records += [record_of(configuration) for configuration in plan.configurations]
    return proposed


def test_nothing_is_proposed_twice_and_in_the_end_nothing_is_left() -> None:
    few = Candidates.from_configurations(CANDIDATES.configurations[:15])
    planner = CandidatePlanner(few, seed=0)
    proposed = proposed_until_the_end(planner, [])
    assert len(proposed) == len(set(proposed)) == 15


def test_what_is_in_flight_is_not_proposed_again() -> None:
    planner = CandidatePlanner(CANDIDATES, seed=0)
    records: list[ProbeRecord] = []
    for _ in range(5):
        probe(planner, records)
    in_flight: list[Configuration] = []
    for _ in range(6):
        plan = plan_of(planner, records, in_flight)
        assert not set(in_flight) & set(plan.configurations)
        in_flight += plan.configurations


def test_several_probes_may_be_in_flight_before_anything_is_measured() -> None:
    planner = CandidatePlanner(CANDIDATES, seed=0)
    in_flight: list[Configuration] = []
    for _ in range(8):
        in_flight += plan_of(planner, [], in_flight).configurations
    assert len({configuration.launch for configuration in in_flight}) == 8


@pytest.mark.parametrize(
    ("failure", "whole_launch", "again"),
    [
        ("out_of_memory", True, False),
        ("crash", True, False),
        ("time_limit", True, False),
        ("not_taken", False, False),
        ("cancelled", False, True),
    ],
)
def test_failures_close_a_configuration_or_its_launch(
    failure: str, whole_launch: bool, again: bool
) -> None:
    few = Candidates.from_configurations(CANDIDATES.configurations[:15])  # three launches of five
    failed = few.configurations[6]
    proposed = proposed_until_the_end(
        CandidatePlanner(few, seed=0), [record_of(failed, failure=failure)]
    )
    assert (failed in proposed) == again
    others = [c for c in few.configurations if c.launch == failed.launch and c != failed]
    assert all((c in proposed) != whole_launch for c in others)
    assert len(proposed) == (10 if whole_launch else 15 if again else 14)


def test_a_launch_that_failed_after_all_its_settings_is_not_continued() -> None:
    """As of an agent that died when it was given further settings."""
    few = Candidates.from_configurations(CANDIDATES.configurations[:15])
    ended = replace(record_of(few.configurations[6]), failure=Failure("crash", "the agent died"))
    proposed = proposed_until_the_end(CandidatePlanner(few, seed=0), [ended])
    assert not [c for c in proposed if c.launch == ended.request.launch]
    assert len(proposed) == 10


def test_records_of_other_configurations_are_passed_over() -> None:
    planner = CandidatePlanner(CANDIDATES, seed=0)
    records = [record_of(Configuration.of(data_parallel=1, micro_batch=64, clock_MHz=600))]
    visited = replace(record_of(CANDIDATES.configurations[3]), measurements=())
    records.append(visited)  # a setting that was visited, and of which nothing is known
    for _ in range(7):
        assert CANDIDATES.configurations[3] not in probe(planner, records).configurations
    planner._fit(planner._observe(PlanningState(records)))
    assert planner.surrogates.leave_one_out().measurements == len(records) - 2


def test_a_planner_resumes_from_the_records_alone() -> None:
    planner, records = CandidatePlanner(CANDIDATES, seed=0), list[ProbeRecord]()
    for _ in range(6):
        probe(planner, records)
    known = {c for record in records for c in record.request.configurations()}
    fresh = CandidatePlanner(CANDIDATES, seed=0)
    for _ in range(4):
        plan = probe(fresh, records)
        assert plan.reason == "expected improvement"
        assert not known & set(plan.configurations)


def test_a_planner_answers_for_the_records_that_it_is_given() -> None:
    """Another study's records, or fewer of them, leave nothing behind."""
    planner, records = CandidatePlanner(CANDIDATES, seed=0), list[ProbeRecord]()
    for _ in range(6):
        probe(planner, records)
    planner.plan(PlanningState(tuple(records)))
    fewer = records[:4]
    plan = plan_of(planner, fewer)
    assert len(planner._observe(PlanningState(tuple(fewer))).measured) == 4
    again = CandidatePlanner(CANDIDATES, seed=0)
    assert plan.configurations == plan_of(again, fewer).configurations


def test_the_same_seed_plans_the_same() -> None:
    runs = []
    for _ in range(2):
        planner, records = CandidatePlanner(CANDIDATES, seed=5), list[ProbeRecord]()
        runs.append([probe(planner, records).configurations for _ in range(7)])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_after_many_measurements_a_search_looks_at_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a small limit only some launches are drawn; the search must still continue and end."""
    monkeypatch.setattr("tuner.search.joint_draws.MOST_WORK", 400)
    monkeypatch.setattr("tuner.search.joint_draws.LEAST_TAKEN", 20)
    planner, records = CandidatePlanner(CANDIDATES, seed=0), list[ProbeRecord]()
    while len(records) <= 120 and planner.plan(PlanningState(tuple(records))) is not None:
        probe(planner, records)
    assert planner._pool.tracked is not None
    assert len(planner._pool.tracked) < len(CANDIDATES)
    visited = {c for record in records for c in record.request.configurations()}
    assert gap(TRUTH, visited) < 0.05


# -- the search, for real --------------------------------------------------------------------------

Table = Mapping[Configuration, tuple[float, float]]
TRUTH: Table = {configuration: truth(configuration) for configuration in CANDIDATES.configurations}


def gap(table: Table, measured: set[Configuration]) -> float:
    """Share of the true front's hypervolume (log axes) that the measured points do not cover."""
    logs = {c: np.log([t * p, t]) for c, (t, p) in table.items()}
    every = np.array(list(logs.values()))
    reference = reference_point(every)
    found = hypervolume(np.array([logs[c] for c in measured]), reference)
    return 1 - found / hypervolume(every, reference)


def searched(
    table: Table, *, measurements: int, seed: int, cost: ProbeCost
) -> list[list[Configuration]]:
    """Return what each launch visited until this number of noisy measurements was made."""
    rng = np.random.default_rng(seed)
    planner = CandidatePlanner(Candidates.from_configurations(table), seed=seed)
    records: list[ProbeRecord] = []
    launches: list[list[Configuration]] = []

    def noisy(configuration: Configuration) -> tuple[float, float]:
        seconds, watts = table[configuration]
        return seconds * math.exp(rng.normal(0, 0.002)), watts * math.exp(rng.normal(0, 0.015))

    while sum(map(len, launches)) < measurements:
        launches.append(probe_with(planner, records, noisy, cost=cost))
    return launches


def paid_J(table: Table, cost: ProbeCost, launch: Sequence[Configuration]) -> float:
    """Return the joules of a launch that visits these configurations."""
    times_s, powers_W = np.array([table[configuration] for configuration in launch]).T
    return float(cost.launch_J(powers_W[0]) + cost.visit_J(powers_W, times_s).sum())


def by_chance(table: Table, *, joules: float, seed: int, cost: ProbeCost) -> float:
    """Gap after launches of one configuration each, drawn at random, for these joules."""
    every, found = list(table), set[Configuration]()
    for place in np.random.default_rng(seed).permutation(len(table)):
        joules -= paid_J(table, cost, [every[place]])
        if joules < 0:
            break
        found.add(every[place])
    return gap(table, found)


def assert_better_than_chance(table: Table, measurements: int, cost: ProbeCost) -> None:
    """The search spends joules: chance has as many, not as many measurements."""
    searches = [searched(table, measurements=measurements, seed=s, cost=cost) for s in range(4)]
    ours = [gap(table, {c for launch in each for c in launch}) for each in searches]
    joules = np.median([sum(paid_J(table, cost, launch) for launch in each) for each in searches])
    chance = [by_chance(table, joules=float(joules), seed=s, cost=cost) for s in range(40)]
    assert np.median(ours) < 0.6 * np.median(chance)  # the median of four may be a fifth off


@pytest.mark.slow
def test_the_search_beats_chance_at_equal_joules() -> None:
    assert_better_than_chance(TRUTH, 24, ProbeCost())


def recorded(folder: Path, group: Mapping[str, str]) -> tuple[Table, ProbeCost]:
    def value(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
        return text

    about = tomllib.loads((folder / "table.toml").read_text())
    with (folder / "table.csv").open() as lines:
        rows = [r for r in csv.DictReader(lines) if all(r[k] == v for k, v in group.items())]
    table = {
        Configuration(
            Settings({k: value(r[k]) for k in about["launch_knobs"]}),
            Settings({k: value(r[k]) for k in about["live_knobs"]}),
        ): (float(r[about["time_s"]]), float(r[about["power_W"]]))
        for r in rows
    }
    return table, ProbeCost(**about["cost"])


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize(
    ("workload", "hardware"),
    [
        ("cifar100/shufflenetv2/adadelta", "V100 (1 GPU)"),
        pytest.param("librispeech/deepspeech2/adamw", "V100 (1 GPU)", marks=pytest.mark.long),
        pytest.param(
            "librispeech/deepspeech2/adamw", "Quadro RTX6000 (1 GPU)", marks=pytest.mark.long
        ),
    ],
)
def test_the_search_beats_chance_on_recorded_measurements(workload: str, hardware: str) -> None:
    group = {"workload": workload, "hardware": hardware}
    table, cost = recorded(TRACES / "zeus-nsdi23", group)
    assert_better_than_chance(table, 25, cost)
