"""Rules of a search: what ends it, and in which figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from tests.search.test_acquisition import CONFIGURATIONS
from tuner.problem.constraints import Constraints
from tuner.problem.from_recording import table_problem
from tuner.problem.stop_reason import StopReason, stop_sentence
from tuner.problem.study_spec import StudySpec
from tuner.results.state import StudyState
from tuner.search.planner import ProbePlan
from tuner.search.question import Question
from tuner.search.regret import RegretEstimate
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.study.rules import (
    node_failures,
    peak_limit_of,
    reason_to_stop,
    with_next_probe,
)
from tuner.testing.studies import (
    measured,
    record,
    request,
    run_optimize,
    run_replay,
    write_table,
)
from tuner.workload.probe import Failure, MeterInfo, Scope


def spec_of(folder: Path) -> StudySpec:
    problem, _ = table_problem(write_table(folder), None, None)
    return StudySpec("s", None, problem)


def test_the_share_that_a_search_ends_on_is_the_one_that_was_tested(tmp_path: Path) -> None:
    # A front that is drawn small has a noise of more than itself.
    estimate = RegretEstimate(np.full(8, 0.05), np.full(8, 1.9), np.zeros(8))
    plan = ProbePlan((CONFIGURATIONS[0],), "", expected_gain=0.01, regret=estimate)
    reason = reason_to_stop(StudyState(spec_of(tmp_path), [record()]), plan, 1.0)
    assert reason is not None
    assert reason.figures["regret"] == pytest.approx(0.1)
    assert "more than 10 % of the front's hypervolume" in stop_sentence(reason)


@pytest.mark.parametrize(
    ("power_W", "scope", "holds"), [(260, "gpu", True), (300, "gpu", False), (240, "node", False)]
)
def test_a_power_limit_bounds_the_power_of_gpus_that_keep_to_it(
    tmp_path: Path, power_W: float, scope: Scope, holds: bool
) -> None:
    spec = replace(spec_of(tmp_path), constraints=Constraints(peak_power_W=400.0))
    live = Settings(power_limit_W=125)  # of each of the request's two
    one = record(
        request=request(live=(live,)),
        measurements=(measured(live, power_W=power_W),),
        meter=MeterInfo("nvml", scope, "a GPU's counter"),
    )
    limit = peak_limit_of(StudyState(spec, [one]))
    assert limit is not None
    assert limit.limits_hold == holds


def test_a_cap_on_peak_power_is_refused_where_no_probe_can_show_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    recorded = write_table(tmp_path / "table")
    with pytest.raises(InputError, match=r"a recording holds mean power only.*--power-cap"):
        run_replay(recorded, peak_power_W=100.0, runs_dir=runs)
    with pytest.raises(InputError, match="the models predict mean power only"):
        run_optimize(
            "opt-350m",
            cluster="a100-8",
            executor="simulated",
            space="parallelism",
            peak_power_W=1500.0,
            runs_dir=runs,
        )
    assert not list(runs.glob("*/study.toml"))


def test_a_limit_tells_what_the_next_probe_would_take_and_bring() -> None:
    limit, one = StopReason("max_probes", {"max_probes": 8, "reserved": 0}), CONFIGURATIONS[:1]
    plan = ProbePlan(one, "", score=0.1, expected_gain=0.02, cost_J=3000.0)
    asked = Question(Constraints(deadline_s=9.0), 1)
    told = with_next_probe(limit, plan, lambda _, planned_kJ: 2 * planned_kJ, asked)
    added = {"next_kJ": 6.0, "expected_gain": 0.02, "of_answer": 1.0}
    assert told.figures == {**limit.figures, **added}
    for plan_without in (None, ProbePlan(one, "space-filling start")):
        assert with_next_probe(limit, plan_without, lambda *_: 1.0, None) == limit
    stopped = StopReason("stopped")
    assert with_next_probe(stopped, plan, lambda *_: 1.0, None) == stopped


def test_a_search_that_a_limit_ends_says_what_it_leaves(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table")
    options = {"runs_dir": tmp_path, "report": False, "max_probes": 4, "verify": False}
    result = run_replay(table, **options)
    assert "another one takes" in result.stopped
    sampler = optuna.samplers.RandomSampler(seed=0)
    by_chance = run_replay(table, sampler=sampler, **options)
    assert "another one" not in by_chance.stopped


@pytest.mark.parametrize(
    ("hosts", "ends"),
    [
        ("aaa", True),
        ("aa", False),
        ("aa.a", False),  # a probe succeeded in between
        (".aaa", True),
        ("abc", False),  # three nodes of many, each set aside after its first failure
        ("abaca", True),
        ("abcabc", False),
    ],
)
def test_a_search_ends_when_one_node_fails_again_and_again(hosts: str, ends: bool) -> None:
    failed = Failure("node", "GPU-1 has 2 more uncorrectable memory errors")
    records = [
        replace(record(), host=host, failure=None if host == "." else failed) for host in hosts
    ]
    reason = node_failures(records, 0)
    assert (reason is not None) == ends
    if reason is not None:
        assert failed.message in stop_sentence(reason)
    assert node_failures(records, len(records) - 2) is None
