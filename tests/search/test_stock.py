"""Optuna's samplers as planners: only open candidates, and refused where they cannot serve."""

from __future__ import annotations

import optuna
import pytest

from tests.support.studies import METER, measured, run_replay, write_table
from tuner.search.planner import PlanningState, ProbePlanner
from tuner.search.sampler import StockPlanner, check_stock
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

optuna.logging.set_verbosity(optuna.logging.ERROR)

#: A third of the grid: most proposals of a sampler are not valid.
SPARSE = Candidates.from_configurations(
    Configuration.of(data_parallel=d, micro_batch=b, zero_stage=z, clock_MHz=c)
    for d in (1, 2, 4)
    for b in (1, 2, 4)
    for z in (0, 1, 3)
    for c in (900, 1200, 1400)
    if (d + b + z) % 3 == 0
)
STOCK = [
    optuna.samplers.TPESampler,
    optuna.samplers.NSGAIISampler,
    optuna.samplers.NSGAIIISampler,
    optuna.samplers.RandomSampler,
]


class Stubborn(optuna.samplers.BaseSampler):
    """Sampler that always proposes the same point."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):
        levels = getattr(param_distribution, "choices", None)
        return levels[0] if levels else param_distribution.low


def figures(configuration: Configuration) -> tuple[float, float]:
    clock = float(configuration.get("clock_MHz") or 0) / 1400  # type: ignore[arg-type]
    seconds = 4 / configuration.data_parallel**0.6 / clock * (1 + 1 / configuration.micro_batch)
    return seconds, configuration.data_parallel * (90 + 200 * clock**2.5)


def record_of(configuration: Configuration) -> ProbeRecord:
    seconds, watts = figures(configuration)
    request = ProbeRequest("p0000", configuration.launch, (configuration.live,))
    window = measured(configuration.live, time_s=seconds, power_W=watts)
    return ProbeRecord(request, (window,), METER)


def probe(planner: ProbePlanner, records: list[ProbeRecord]) -> Configuration | None:
    plan = planner.plan(PlanningState(tuple(records)))
    if plan is None:
        return None
    (configuration,) = plan.configurations
    records.append(record_of(configuration))
    return configuration


@pytest.mark.parametrize("kind", STOCK)
def test_each_proposes_open_candidates_only_until_none_is_left(kind) -> None:
    planner, records = StockPlanner(SPARSE, kind(seed=0)), []
    proposed = [probe(planner, records) for _ in range(len(SPARSE))]
    assert set(proposed) == set(SPARSE.configurations)
    assert planner.plan(PlanningState(tuple(records))) is None


@pytest.mark.parametrize("kind", STOCK)
def test_the_same_seed_proposes_the_same(kind) -> None:
    runs = []
    for _ in range(2):
        planner, records = StockPlanner(SPARSE, kind(seed=7)), []
        runs.append([probe(planner, records) for _ in range(6)])
    assert runs[0] == runs[1]


def test_candidates_in_flight_are_not_proposed_and_results_are_reported() -> None:
    planner, records = StockPlanner(SPARSE, optuna.samplers.TPESampler(seed=0)), []
    for _ in range(4):
        probe(planner, records)
    in_flight: list[Configuration] = []
    for _ in range(5):
        plan = planner.plan(PlanningState(tuple(records), tuple(in_flight)))
        assert plan is not None
        assert not set(in_flight) & set(plan.configurations)
        in_flight += plan.configurations
    fresh = StockPlanner(SPARSE, optuna.samplers.TPESampler(seed=0))
    fresh.plan(PlanningState(tuple(records), tuple(in_flight)))
    reported = fresh._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert [trial.values for trial in reported] == [
        pytest.approx([seconds * watts, seconds])
        for seconds, watts in (figures(r.request.configurations()[0]) for r in records)
    ]


def test_one_that_only_repeats_itself_gets_its_neighbours() -> None:
    planner, records = StockPlanner(SPARSE, Stubborn()), []
    proposed = [probe(planner, records) for _ in range(6)]
    assert len(set(proposed)) == 6
    # The refused proposal, and the trial of each neighbour; nearest: few knobs apart.
    assert len(planner._study.trials) == 2 * 6
    target = {"data_parallel": 1, "micro_batch": 1, "zero_stage": 0, "clock_MHz": 900}
    apart = [sum(c.get(k) != v for k, v in target.items()) for c in proposed if c is not None]
    assert apart[0] == 1
    assert max(apart) <= 2


class OneObjective(Stubborn):
    """Sampler that can search for one objective only, as Optuna's CmaEsSampler."""

    def infer_relative_search_space(self, study, trial):
        self._raise_error_if_multi_objective(study)
        return {}


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (OneObjective(), "OneObjective cannot search for two objectives"),
        ("tpe", "sampler is 'tpe'; give an Optuna sampler"),
        (optuna.samplers.TPESampler, "give an Optuna sampler"),
    ],
)
def test_what_cannot_search_for_two_objectives_is_refused_before_anything_is_started(
    tmp_path, sampler, message
) -> None:
    table = write_table(tmp_path / "table")
    with pytest.raises(InputError, match=message) as caught:
        run_replay(table, sampler=sampler, runs_dir=tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_check_asks_a_copy() -> None:
    """The sampler proposes after the check what it would have proposed without it."""
    sampler, other = (optuna.samplers.RandomSampler(seed=3) for _ in range(2))
    check_stock(sampler)
    first, second = (StockPlanner(SPARSE, each) for each in (sampler, other))
    assert [probe(first, []) for _ in range(3)] == [probe(second, []) for _ in range(3)]


@pytest.mark.parametrize("kind", [optuna.samplers.RandomSampler, optuna.samplers.NSGAIIISampler])
def test_they_run_in_a_study_and_continue_it(tmp_path, kind) -> None:
    table = write_table(tmp_path / "table")
    options = {"name": "study", "runs_dir": tmp_path / "runs", "report": False, "verify": False}
    run_replay(table, sampler=kind(seed=0), max_probes=5, **options)
    result = run_replay(table, sampler=kind(seed=1), max_probes=8, **options)
    assert result.spent.probes == 8
    assert len(result.points) == 8
    assert result.front_points
