"""The sampler: its plans, its observations of a study, and a search that beats chance."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import Trial, TrialState

from tuner.pareto import hypervolume, reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.settings import SamplerDesign
from tuner.search.planner import ProbePlan
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidConfiguration, UnknownName
from tuner.search_spaces.space import Candidates
from tuner.testing.studies import TRACES, probe_with

optuna.logging.set_verbosity(optuna.logging.ERROR)

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


def tell(study: optuna.Study, trial: Trial, configuration: Configuration) -> None:
    seconds, watts = truth(configuration)
    for name, value in {
        "configuration": configuration.key,
        "step_time_s": seconds,
        "power_W": watts,
        "step_time_rse": 0.001,
    }.items():
        trial.set_user_attr(name, value)
    study.tell(trial, [seconds * watts, seconds])


def study_of(sampler: CandidateSampler) -> optuna.Study:
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def plan_of(sampler: CandidateSampler, study: optuna.Study) -> ProbePlan:
    plan = sampler.plan(study)
    assert plan is not None
    return plan


def probe(sampler: CandidateSampler, study: optuna.Study) -> ProbePlan:
    """Plan, ask for each setting, measure and tell."""
    plan = plan_of(sampler, study)
    for configuration in plan.configurations:
        trial = study.ask(sampler.distributions())
        assert sampler.configuration_of(trial.params) == configuration
        tell(study, trial, configuration)
    return plan


# -- names ---------------------------------------------------------------------------------------


def test_distributions_are_ranges_where_levels_are_even_and_levels_where_not() -> None:
    distributions = CandidateSampler(CANDIDATES).distributions()
    assert distributions["clock_MHz"] == IntDistribution(600, 1400, step=200)
    assert distributions["micro_batch"] == CategoricalDistribution([1, 2, 4])
    assert distributions["zero_stage"] == CategoricalDistribution([0, 1, 3])
    assert distributions["activation_checkpointing"] == CategoricalDistribution(["full", "none"])
    assert "tensor_parallel" not in distributions


def test_a_clock_left_to_the_device_is_a_level_of_its_own() -> None:
    candidates = Candidates.from_configurations(
        [Configuration.of(clock_MHz=c) for c in (600, 800)] + [Configuration.of()]
    )
    sampler = CandidateSampler(candidates)
    assert sampler.distributions() == {"clock_MHz": CategoricalDistribution([None, 600, 800])}
    for configuration in candidates.configurations:
        assert sampler.configuration_of(sampler.params_of(configuration)) == configuration


def test_every_candidate_survives_the_way_to_parameters_and_back() -> None:
    sampler = CandidateSampler(CANDIDATES)
    distributions = sampler.distributions()
    for configuration in CANDIDATES.configurations:
        params = sampler.params_of(configuration)
        for name, value in params.items():
            assert distributions[name]._contains(distributions[name].to_internal_repr(value))
        assert sampler.configuration_of(params) == configuration


def test_parameters_of_no_candidate_are_refused() -> None:
    sampler = CandidateSampler(CANDIDATES)
    params = sampler.params_of(CANDIDATES.configurations[0])
    with pytest.raises(InvalidConfiguration, match="not among the candidates"):
        sampler.configuration_of({**params, "zero_stage": 3, "data_parallel": 1})
    with pytest.raises(UnknownName, match="zero_stage"):
        sampler.configuration_of({k: v for k, v in params.items() if k != "zero_stage"})


# -- plans ---------------------------------------------------------------------------------------


def test_the_start_spreads_over_launches_and_then_the_surrogates_choose() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0, design=SamplerDesign(start_launches=4))
    study = study_of(sampler)
    start = [probe(sampler, study) for _ in range(4)]
    assert len({plan.launch for plan in start}) == 4
    assert {plan.reason for plan in start} == {"space-filling start"}
    assert all(math.isinf(plan.expected_gain) for plan in start)
    assert all(1 <= len(plan.live) <= 3 for plan in start)
    later = probe(sampler, study)
    assert later.reason == "expected improvement"
    assert later.expected_gain > 0
    assert later.score > 0
    assert later.cost_J > 0
    assert later.configurations == tuple(Configuration(later.launch, live) for live in later.live)


def test_nothing_is_proposed_twice_and_in_the_end_nothing_is_left() -> None:
    few = Candidates.from_configurations(CANDIDATES.configurations[:15])
    sampler = CandidateSampler(few, seed=0, design=SamplerDesign(max_live=3))
    study = study_of(sampler)
    proposed: list[Configuration] = []
    while (plan := sampler.plan(study)) is not None:
        assert len(plan.live) <= 3
        for configuration in plan.configurations:
            proposed.append(configuration)
            tell(study, study.ask(sampler.distributions()), configuration)
    assert len(proposed) == len(set(proposed)) == 15


def test_what_is_pending_is_not_proposed_again() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    for _ in range(5):
        probe(sampler, study)
    in_flight: set[Configuration] = set()
    for _ in range(6):
        plan = plan_of(sampler, study)
        assert not in_flight & set(plan.configurations)
        for configuration in plan.configurations:
            study.ask(sampler.distributions()).set_user_attr("configuration", configuration.key)
            in_flight.add(configuration)


def test_several_probes_may_be_in_flight_before_anything_is_measured() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    launches = set()
    for _ in range(8):
        plan = plan_of(sampler, study)
        launches.add(plan.launch)
        for configuration in plan.configurations:
            study.ask(sampler.distributions()).set_user_attr("configuration", configuration.key)
    assert len(launches) == 8


@pytest.mark.parametrize(
    ("failure", "whole_launch", "again"),
    [
        ("out_of_memory", True, False),
        ("crash", True, False),
        ("time_limit", True, False),
        (None, False, False),
        ("cancelled", False, True),
    ],
)
def test_failures_close_a_configuration_or_its_launch(
    failure: str | None, whole_launch: bool, again: bool
) -> None:
    few = Candidates.from_configurations(CANDIDATES.configurations[:15])  # three launches of five
    sampler = CandidateSampler(few, seed=0)
    study = study_of(sampler)
    failed = few.configurations[6]
    trial = study.ask(sampler.distributions())
    trial.set_user_attr("configuration", failed.key)
    if failure:
        trial.set_user_attr("failure", failure)
    study.tell(trial, state=TrialState.FAIL)
    proposed = []
    while (plan := sampler.plan(study)) is not None:
        for configuration in plan.configurations:
            proposed.append(configuration)
            tell(study, study.ask(sampler.distributions()), configuration)
    assert (failed in proposed) == again
    others = [c for c in few.configurations if c.launch == failed.launch and c != failed]
    assert all((c in proposed) != whole_launch for c in others)
    assert len(proposed) == (10 if whole_launch else 15 if again else 14)


def test_trials_of_unknown_configurations_and_without_figures_are_passed_over() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    study.add_trial(
        optuna.create_trial(
            values=[1.0, 1.0],
            user_attrs={"configuration": "batch=7", "step_time_s": 1.0, "power_W": 1.0},
        )
    )
    study.add_trial(
        optuna.create_trial(
            values=[1.0, 1.0],
            user_attrs={
                "configuration": CANDIDATES.configurations[3].key,
                "step_time_s": "broken",
                "power_W": None,
            },
        )
    )
    for _ in range(7):
        assert CANDIDATES.configurations[3] not in probe(sampler, study).configurations
    sampler._fit(sampler._observe(study))
    loo = sampler.surrogates.leave_one_out()
    assert loo.measurements == len(study.trials) - 2


def test_a_sampler_resumes_from_the_study_alone() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    for _ in range(6):
        probe(sampler, study)
    measured = {trial.user_attrs["configuration"] for trial in study.trials}
    fresh = CandidateSampler(CANDIDATES, seed=0)
    study.sampler = fresh
    for _ in range(4):
        plan = probe(fresh, study)
        assert plan.reason == "expected improvement"
        assert not measured & {configuration.key for configuration in plan.configurations}


def test_the_same_seed_plans_the_same() -> None:
    runs = []
    for _ in range(2):
        sampler = CandidateSampler(CANDIDATES, seed=5)
        study = study_of(sampler)
        runs.append([probe(sampler, study).configurations for _ in range(7)])
    assert runs[0] == runs[1]


def test_it_serves_study_optimize_without_a_driver() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)

    def objective(trial: Trial) -> tuple[float, float]:
        params = {
            name: trial.suggest_int(name, d.low, d.high, step=d.step)
            if isinstance(d, IntDistribution)
            else trial.suggest_categorical(name, d.choices)  # type: ignore[attr-defined]
            for name, d in sampler.distributions().items()
        }
        configuration = sampler.configuration_of(params)  # always valid
        seconds, watts = truth(configuration)
        trial.set_user_attr("configuration", configuration.key)
        trial.set_user_attr("step_time_s", seconds)
        trial.set_user_attr("power_W", watts)
        trial.suggest_float("something_else", 0, 1)
        return seconds * watts, seconds

    study.optimize(objective, n_trials=20)
    assert len({trial.user_attrs["configuration"] for trial in study.trials}) == 20


@pytest.mark.slow
def test_many_candidates_are_searched_by_their_most_promising_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a small limit only some launches are tracked; the search must still continue and end."""
    monkeypatch.setattr("tuner.search.candidate_pool.TRACKED_ENTRIES", 400)
    monkeypatch.setattr("tuner.search.candidate_pool.MIN_TRACKED", 20)
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    while (plan := sampler.plan(study)) is not None:
        for configuration in plan.configurations:
            tell(study, study.ask(sampler.distributions()), configuration)
        if len(study.trials) > 120:
            break
    assert sampler._pool.tracked is not None
    assert len(sampler._pool.tracked) < len(CANDIDATES)
    measured = {sampler.configuration_of(trial.params) for trial in study.trials}
    assert gap(TRUTH, measured) < 0.05


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


def searched(table: Table, *, measurements: int, seed: int, **options: Any) -> float:
    """Gap after this number of noisy measurements that the sampler chose."""
    rng = np.random.default_rng(seed)
    sampler = CandidateSampler(Candidates.from_configurations(table), seed=seed, **options)
    study = study_of(sampler)
    measured: list[Configuration] = []

    def noisy(configuration: Configuration) -> tuple[float, float]:
        seconds, watts = table[configuration]
        return seconds * math.exp(rng.normal(0, 0.002)), watts * math.exp(rng.normal(0, 0.015))

    while len(measured) < measurements:
        measured += probe_with(sampler, study, noisy)
    return gap(table, set(measured[:measurements]))


def by_chance(table: Table, *, measurements: int, seed: int) -> float:
    rows = np.random.default_rng(seed).permutation(len(table))[:measurements]
    every = list(table)
    return gap(table, {every[i] for i in rows})


@pytest.mark.slow
def test_the_search_beats_chance_at_equal_measurements() -> None:
    seeds = range(4)
    ours = [searched(TRUTH, measurements=24, seed=s) for s in seeds]
    chance = [by_chance(TRUTH, measurements=24, seed=s) for s in range(40)]
    assert np.median(ours) < 0.5 * np.median(chance)
    assert max(ours) < np.quantile(chance, 0.75)


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
    ours = [searched(table, measurements=25, seed=s, cost=cost) for s in range(4)]
    chance = [by_chance(table, measurements=25, seed=s) for s in range(40)]
    assert np.median(ours) < 0.5 * np.median(chance)
