"""Stock samplers in the real study: only open candidates, with the results of the study."""

from __future__ import annotations

import optuna
import pytest

from tuner.search.optuna_samplers import OURS, SAME_ASKS, SAMPLERS, StockSampler, make_sampler
from tuner.search.planner import ProbePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.space import Candidates
from tuner.testing.studies import run_replay, write_table

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
STOCK = [name for name in SAMPLERS if name != OURS]


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


def measure(sampler: ProbePlanner, study: optuna.Study) -> Configuration | None:
    plan = sampler.plan(study)
    if plan is None:
        return None
    assert len(plan.configurations) == 1
    (configuration,) = plan.configurations
    trial = study.ask(sampler.distributions())
    assert sampler.configuration_of(trial.params) == configuration
    seconds, watts = figures(configuration)
    for name, value in (
        ("configuration", configuration.key),
        ("step_time_s", seconds),
        ("power_W", watts),
    ):
        trial.set_user_attr(name, value)
    study.tell(trial, [seconds * watts, seconds])
    return configuration


def study_of(sampler: ProbePlanner) -> optuna.Study:
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


@pytest.mark.parametrize("name", STOCK)
def test_each_proposes_open_candidates_only_until_none_is_left(name: str) -> None:
    count = len(SPARSE)
    sampler = make_sampler(name, SPARSE, seed=0)
    study = study_of(sampler)
    proposed = [measure(sampler, study) for _ in range(count)]
    assert None not in proposed
    assert len(set(proposed)) == count
    assert set(proposed) == set(SPARSE.configurations)
    assert sampler.plan(study) is None
    # No refused proposal is in the user's study.
    assert len(study.trials) == count


@pytest.mark.parametrize("name", STOCK)
def test_the_same_seed_proposes_the_same(name: str) -> None:
    runs = []
    for _ in range(2):
        sampler = make_sampler(name, SPARSE, seed=7)
        study = study_of(sampler)
        runs.append([measure(sampler, study) for _ in range(6)])
    assert runs[0] == runs[1]


def test_pending_candidates_are_not_proposed_and_results_are_mirrored() -> None:
    sampler = make_sampler("tpe", SPARSE, seed=0)
    study = study_of(sampler)
    for _ in range(4):
        measure(sampler, study)
    flying = set()
    for _ in range(5):
        plan = sampler.plan(study)
        assert plan is not None
        assert not flying & set(plan.configurations)
        flying |= set(plan.configurations)
        trial = study.ask(sampler.distributions())
        trial.set_user_attr("configuration", plan.configurations[0].key)
    fresh = make_sampler("tpe", SPARSE, seed=0)
    assert isinstance(fresh, StockSampler)
    fresh.plan(study)
    mirrored = fresh._shadow.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert sorted(t.values for t in mirrored) == sorted(
        t.values for t in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    )


def test_one_that_only_repeats_itself_gets_its_neighbours() -> None:
    sampler = make_sampler(Stubborn(), SPARSE, seed=0)
    study = study_of(sampler)
    proposed = [measure(sampler, study) for _ in range(6)]
    assert len(set(proposed)) == 6
    assert isinstance(sampler, StockSampler)
    # Refused asks of the shadow study, and the trial of each neighbour; nearest: few knobs apart.
    assert len(sampler._shadow.trials) == 6 * (SAME_ASKS + 1)
    target = {"data_parallel": 1, "micro_batch": 1, "zero_stage": 0, "clock_MHz": 900}
    apart = [sum(c.get(k) != v for k, v in target.items()) for c in proposed if c is not None]
    assert apart[0] == 1
    assert max(apart) <= 2


def test_an_unknown_name_is_refused_before_anything_is_started(tmp_path) -> None:
    table = write_table(tmp_path / "table")
    with pytest.raises(UnknownName, match="tpe"):
        run_replay(table, sampler="simplex", runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["random", optuna.samplers.NSGAIIISampler(seed=0)])
def test_they_run_in_the_real_study(tmp_path, name) -> None:
    result = run_replay(
        write_table(tmp_path / "table"),
        sampler=name,
        max_probes=8,
        runs_dir=tmp_path / "runs",
        report=False,
    )
    assert result.spent.probes == 8
    assert len(result.points) >= 6
    assert result.front_points
