"""Rules of a search: what ends it, and in which figures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from tests.search.test_score import CONFIGURATIONS
from tests.support.studies import (
    EIGHT_GPUS,
    FormulaRunner,
    measured,
    problem_of_job,
    record,
    request,
    run_optimize,
    run_replay,
    write_table,
)
from tuner.answer.state import StudyState
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings, StopReason, stop_sentence
from tuner.problem.study_spec import StudySpec
from tuner.recordings.problem import table_problem
from tuner.search.joint_draws import RegretEstimate
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search.question import Question
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.study import session
from tuner.study.rules import (
    idle_share,
    node_failures,
    peak_limit_of,
    reason_to_stop,
    repeat_due,
    with_next_probe,
)
from tuner.workload.records.probe import (
    Failure,
    MeterInfo,
    NextSettings,
    ProbeRequest,
    Runner,
    Scope,
)


def spec_of(folder: Path) -> StudySpec:
    problem, _ = table_problem(write_table(folder), None, None)
    return StudySpec("s", None, problem)


@pytest.mark.parametrize(
    ("share", "lost", "ends"),
    [(0.01, 0.0099, True), (0.01, 0.0101, False), (0.05, 0.0101, True), (0.0, 0.0, True)],
)
def test_a_search_ends_when_more_than_the_user_asked_is_unlikely_to_be_left(
    tmp_path: Path, share: float, lost: float, ends: bool
) -> None:
    # In one draw of ten more is lost: too many. In one of twelve it is not.
    spec = spec_of(tmp_path)
    spec = replace(spec, settings=SearchSettings(front_regret=share))
    for draws, few in ((10, False), (12, True)):
        lost_in = np.full(draws, np.log1p(lost))
        lost_in[0] = 0.5
        plan = ProbePlan((CONFIGURATIONS[0],), "", regret=RegretEstimate(lost_in))
        reason = reason_to_stop(StudyState(spec, [record()]), plan, 1.0)
        assert (reason is not None) == (ends and few)
        if reason is not None:
            assert reason.figures["regret"] == share
            assert "sure); trying another configuration takes" in stop_sentence(reason)


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


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ([(0, 30), (1, 30), (2, 30), (3, 30)], False),  # four parts of a node that went
        ([(0, 9), (1, 9), (10, 19), (11, 19)], False),  # two parts failed twice
        ([(0, 9), (0, 12), (10, 20), (12, 22), (20, 29)], True),  # one part failed three times
        ([(0, 9), (0, 90), (10, 19), (20, 29)], True),  # while another probe ran
    ],
)
def test_probes_that_a_node_ends_together_count_once(
    seconds: list[tuple[int, int]], ends: bool
) -> None:
    failed = Failure("node", "node lost: a left the Ray cluster while it measured")
    records = [
        replace(
            record(),
            host="a",
            failure=failed,
            started_at=f"2026-11-28T09:{began // 60:02}:{began % 60:02}.000+00:00",
            wall_s=float(end - began),
        )
        for began, end in seconds
    ]
    assert (node_failures(records, 0) is not None) == ends


def test_the_share_of_an_idle_node_is_measured_or_stated_and_unknown_for_a_recording(
    tmp_path: Path,
) -> None:
    cluster = load_cluster("a100-8")
    problem = problem_of_job("opt-350m", cluster, predicted=True)
    on_a_node = replace(request(), launch=Settings(data_parallel=8, micro_batch=4))
    made = record(request=on_a_node, wall_s=10.0, energy_J=20_000.0)
    assert idle_share(problem, []) == 0.0
    stated_W = 8 * cluster.device.idle_W + cluster.host_W
    assert idle_share(problem, [made]) == pytest.approx(stated_W / 2000)
    assert idle_share(problem, [replace(made, idle_W=500.0)]) == pytest.approx(0.25)
    # A probe over two nodes draws the power of two.
    wide = replace(on_a_node, launch=Settings(data_parallel=16, micro_batch=4))
    assert idle_share(problem, [replace(made, request=wide, idle_W=500.0)]) == 0.0
    table, _ = table_problem(write_table(tmp_path), None, None)
    assert idle_share(table, [made]) == 0.0


def test_a_repeat_of_today_is_due_early_only_as_often_as_it_is_due_at_all(tmp_path: Path) -> None:
    problem = spec_of(tmp_path).problem
    again = record(request=replace(request(), purpose="verify"))
    assert not repeat_due(problem, [record()])
    assert repeat_due(problem, [record()], early=True)
    assert repeat_due(problem, [record(), again], early=True)
    assert not repeat_due(problem, [record(), again, again], early=True)


@pytest.mark.parametrize(
    ("failures", "due"), [("node", True), ("node node", False), ("crash", False)]
)
def test_a_repeat_that_its_node_lost_is_made_again_once(
    failures: str, due: bool, tmp_path: Path
) -> None:
    problem = spec_of(tmp_path).problem
    again = record(request=replace(request(), purpose="verify"))
    lost = [replace(again, failure=Failure(kind, "it ended")) for kind in failures.split()]
    assert repeat_due(problem, [record(), again, *lost], early=True) == due


@pytest.mark.usefixtures("next_candidates")
def test_a_search_of_every_candidate_says_that_none_is_left(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table")
    options = {"runs_dir": tmp_path, "report": False, "verify": False, "front_regret": 0.0}
    result = run_replay(table, **options, max_probes=500)
    assert result.stopped == "The search ended: no candidate is left to try."


@pytest.mark.usefixtures("next_candidates")
def test_a_node_that_would_wait_launches_today_again_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waits(session.CandidatePlanner):
        def better_to_wait(self, state: PlanningState) -> bool:
            return True  # asked while something is in flight

    monkeypatch.setattr(session, "CandidatePlanner", Waits)
    executor = Overlapping(FormulaRunner(**EIGHT_GPUS), capacity=2)
    run_optimize(
        replace(load_job("opt-350m"), steps=10**8),
        cluster="a100-8",
        executor=executor,
        max_probes=9,
        runs_dir=tmp_path,
        report=False,
        progress=False,
    )
    assert executor.purposes[:3] == ["baseline", "search", "verify"]
    assert executor.beside["verify"][0] == 1
    assert executor.beside["search"] == [0] * len(executor.beside["search"])


class Overlapping(SimulatedExecutor):
    """Executor that counts, by purpose, the probes beside which each one begins."""

    def __init__(self, runner: Runner, *, capacity: int) -> None:
        super().__init__(runner, capacity=capacity)
        self.beside: dict[str, list[int]] = defaultdict(list)
        self.purposes: list[str] = []

    def submit(self, request: ProbeRequest, extend: NextSettings | None = None) -> None:
        self.beside[request.purpose].append(self.in_flight)
        self.purposes.append(request.purpose)
        super().submit(request, extend)
