"""Choosing again among the points of a run, without measuring anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.answer.test_judge import judge_of, searched
from tests.answer.test_recommendation import result_of
from tests.support.results import large_result
from tests.support.studies import run_replay, write_table
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError, InvalidValue


def test_the_slowdown_is_relative_to_the_baseline():
    result = large_result()
    today_s = result.baseline.time_to_solution_s
    for share in (0.0, 0.02, 0.1, 0.5):
        found = result.choose(max_slowdown=share)
        fits = [p for p in result.points if p.time_to_solution_s <= (1 + share) * today_s]
        least_kJ = min(p.energy_to_solution_kJ for p in fits)
        assert found.point in fits
        assert found.point.energy_to_solution_kJ <= 1.01 * least_kJ
        assert found.met
        assert "more than today" in found.choice.sentence
    both = result.choose(max_slowdown=0.5, deadline_s=today_s)
    assert both.point == result.choose(max_slowdown=0.0).point
    assert "more than today" not in both.choice.sentence


def test_a_point_is_named_as_the_command_takes_it():
    result = large_result()
    for objective in ("time", "energy", "knee"):
        found = result.choose(Constraints(objective=objective))
        assert result.point(found.name).configuration == found.point.configuration
    peak = result.choose(power_cap_W=1.0)
    assert not peak.met
    assert result.point(peak.name).configuration == peak.point.configuration


def test_a_prediction_is_told_as_one():
    result = large_result()
    meter = replace(result.points[0].meter, name="simulated")
    points = tuple(replace(p, meter=meter, source=meter.basis) for p in result.points)
    found = replace(result, points=points).choose(max_slowdown=0.1)
    assert found.evidence == "predicted"
    assert "nothing was measured" in str(found).splitlines()[-2]


def test_without_a_baseline_a_slowdown_is_refused():
    result = replace(large_result(), baseline=None)
    with pytest.raises(InputError, match="which run 'gpt-h100' did not measure; give a deadline"):
        result.choose(max_slowdown=0.1)
    assert result.choose(deadline_s=1e9).met
    with pytest.raises(InvalidValue, match="max_slowdown is"):
        result.choose(max_slowdown=-0.1)
    nothing = replace(result, points=(), front_points=())
    with pytest.raises(InputError, match="measured nothing"):
        nothing.choose()


def test_a_search_with_a_limit_on_slowdown_chooses_as_asking_again_does(tmp_path):
    result = run_replay(
        write_table(tmp_path / "table", shapes=(4, 6, 8)),  # the baseline is the fastest
        constraints=Constraints(max_slowdown=0.3),
        search=SearchSettings(max_probes=12, seed=1),
        runs_dir=tmp_path / "runs",
        name="r",
        report=False,
    )
    again = result.choose(max_slowdown=0.3)
    assert result.recommended == again.point
    assert result.best != result.baseline
    assert result.best.time_to_solution_s <= 1.3 * result.baseline.time_to_solution_s
    # At speed 3 the table has less energy, for 50 % more time: a window that is not worth a probe.
    assert result.best.configuration.get("speed") == 4
    assert result.choice.rule == "max_slowdown + deadline_s"


def test_where_today_is_kept_it_is_said_as_the_run_says_it():
    """A baseline once was called the fastest, of itself alone."""
    result = result_of(judge_of(searched(np.random.default_rng(4), 0.02)))
    assert result.recommendation.action == "keep"
    assert result.best != result.baseline
    kept = result.choose()
    assert kept.point == result.baseline
    assert kept.choice.sentence == result.headline
