"""The forecast of a search: what the models say of its launches, within every limit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import tuner
from tests.support.studies import problem_of_job
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import Candidates
from tuner.study.forecast import forecast

DEFAULT = SearchSettings().with_default_limits()


@pytest.mark.slow
def test_it_agrees_with_a_simulated_search_to_a_factor_of_two(tmp_path) -> None:
    limits = SearchSettings(max_probes=7, verify=False)
    problem = problem_of_job("opt-350m", "a100-8", predicted=True)
    said = forecast(problem, limits)
    result = tuner.optimize(
        "opt-350m",
        cluster="a100-8",
        executor="simulated",
        search=limits,
        runs_dir=tmp_path,
        report=False,
    )
    # What is said before it begins is the whole search, which may end before its limit.
    assert 0.5 < said.energy_kJ / result.spent.energy_kJ < 2
    assert 0.5 < said.time_s / result.spent.time_s < 2
    assert said.job_kJ == pytest.approx(result.baseline.energy_to_solution_kJ, rel=0.1)


@pytest.mark.extra("tuner.models.job_prior")
def test_limits_and_a_short_training_shorten_it() -> None:
    problem = problem_of_job("opt-350m", "a100-8", predicted=True)
    whole = forecast(problem, DEFAULT)
    assert whole.probes > 10
    each_kJ, each_s = whole.energy_kJ / whole.probes, whole.time_s / whole.probes
    assert forecast(problem, SearchSettings(max_probes=3)).probes == 3
    assert forecast(problem, SearchSettings(probe_budget_kJ=2.5 * each_kJ)).probes == 2
    assert forecast(problem, SearchSettings(search_s=4.5 * each_s)).probes == 4
    short = replace(load_job("opt-350m"), steps=20)
    assert forecast(problem_of_job(short, "a100-8", predicted=True), DEFAULT).probes < whole.probes


@pytest.mark.extra("tuner.models.job_prior")
def test_the_line_names_probes_time_energy_devices_and_clocks() -> None:
    said = forecast(problem_of_job("qwen2.5-7b", "h200-8", predicted=True), DEFAULT).sentence
    assert re.fullmatch(
        r"This search: about \d+ probes, \d+ min, [\d,.]+ (kJ|kWh) \(estimated\) on 8 x "
        r".*; clocks will be changed and put back; Ctrl-C loses nothing\.",
        said,
    )
    still = problem_of_job("qwen2.5-7b", "h200-8", predicted=True, clocks=False)
    assert "clocks" not in forecast(still, DEFAULT).sentence
    assert all(not configuration.live for configuration in still.candidates)


@pytest.mark.extra("tuner.models.job_prior")
def test_a_value_that_the_program_changes_as_it_runs_is_no_clock() -> None:
    """With its clocks left alone, a script with a live knob was told that they will be changed."""
    still = problem_of_job("qwen2.5-7b", "h200-8", predicted=True, clocks=False)
    live = [Configuration(still.baseline.launch, Settings(pause_ms=value)) for value in (0, 30)]
    candidates = Candidates.from_configurations(live)
    said = forecast(replace(still, candidates=candidates, job=None), DEFAULT)
    assert not said.sets_clocks
    assert "clocks" not in said.sentence
