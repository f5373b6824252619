"""The whole study on replayed and modelled probes: what it finds, spends, survives and answers."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import tuner
from tests.support.studies import (
    EIGHT_GPUS,
    LONG_JOB,
    METER,
    TOML,
    FormulaRunner,
    TalliedRunner,
    record,
    run_optimize,
    run_replay,
    table_point,
    write_table,
)
from tests.support.traces import TRACES
from tuner.executors.local import InlineExecutor
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.models.surrogate.gaussian_process import LEAST_ROWS
from tuner.pareto import hypervolume
from tuner.problem.constraints import Limits
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import load_job
from tuner.study import loop, session
from tuner.workload.records.probe import Failure, MeterInfo
from tuner.workload.records.trace import read_trace

pytestmark = pytest.mark.usefixtures("next_candidates")


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table")


@pytest.fixture
def options(tmp_path):
    return {"runs_dir": tmp_path / "runs", "name": "study", "report": False}


def optimize(runner, options, *, capacity=1, job=LONG_JOB, **more):
    executor = SimulatedExecutor(runner, capacity=capacity)
    return run_optimize(job, cluster="cpu-2", executor=executor, **{**options, **more})


# What it finds.


@pytest.mark.searches
def test_a_replayed_study_covers_the_true_front(table, options):
    result = run_replay(table, **options, max_probes=9)
    truth = np.log([table_point(s, v) for s in (1, 2, 3, 4, 6, 8) for v in range(1, 6)])
    truth[:, 1] += truth[:, 0]
    reference = truth.max(axis=0)

    def covered(points):
        return hypervolume(points[:, ::-1], reference[::-1])

    found = np.log([[p.time_to_solution_s, 1000 * p.energy_to_solution_kJ] for p in result.points])
    assert covered(found) >= 0.97 * covered(truth)
    assert result.spent.measurements < len(truth)
    times = [p.time_to_solution_s for p in result.front_points]
    energies = [p.energy_to_solution_kJ for p in result.front_points]
    assert times == sorted(times)
    assert energies == sorted(energies, reverse=True)


@pytest.mark.searches
def test_points_tell_how_they_were_measured(table, options):
    result = run_replay(table, **options, max_probes=6)
    for point in result.points:
        assert point.source == "measured"
        assert "gpu scope, energy metered (recorded table made-up)" in point.how_measured
        low, high = point.energy_interval_kJ
        assert low < point.energy_to_solution_kJ < high
        low, high = point.time_interval_s
        assert low < point.time_to_solution_s < high
        assert 0 <= point.p_nondominated <= 1
        assert point.power_W == pytest.approx(
            1000 * point.energy_to_solution_kJ / point.time_to_solution_s
        )
    measured = {p.configuration for p in result.points}
    assert {p.configuration for p in result.front_points} <= measured
    assert all(point.p_nondominated > 0.05 for point in result.front_points)
    assert result.leave_one_out.measurements == result.spent.measurements
    curve = result.progress
    assert len(curve) == result.spent.probes
    assert curve[-1][0] == pytest.approx(result.spent.energy_kJ)
    assert [hv for _, hv in curve] == sorted(hv for _, hv in curve)
    json.dumps(result.to_json(), default=str)


@pytest.mark.searches
def test_the_baseline_is_measured_first_and_savings_are_told_against_it(table, options):
    result = run_replay(table, **options, max_probes=8, steps=1000)
    records = read_trace(result.run_dir / "trace" / "probes.jsonl").records
    assert [r.request.purpose for r in records].index("baseline") == 0
    # The first launch of the table at its highest speed: what a device does when left alone.
    assert result.baseline.configuration.key == "shape=1 | speed=5"
    before, after = result.baseline.inferred, result.best.inferred
    saved_kJ = before.energy_to_solution_kJ - after.energy_to_solution_kJ
    assert saved_kJ > 0
    assert result.spent.payback_steps == pytest.approx(1000 * result.spent.energy_kJ / saved_kJ)
    assert result.spent.payback_share == pytest.approx(result.spent.payback_steps / 1000)


def test_a_table_can_name_its_baseline(tmp_path, options):
    folder = write_table(tmp_path / "t", toml=TOML + "[baseline]\nshape = 3\nspeed = 2\n")
    result = run_replay(folder, **options, max_probes=2)
    assert result.baseline.configuration.key == "shape=3 | speed=2"


@pytest.mark.searches
def test_repeats_narrow_the_interval(tmp_path, options):
    noisy = TOML + "[noise]\ntime_cv = 0.02\npower_cv = 0.05\n"
    folder = write_table(tmp_path / "t", toml=noisy, shapes=(4, 6))
    result = run_replay(folder, **options, max_probes=14)
    widths: dict[int, list[float]] = {}
    for p in result.points:
        width = math.log(p.time_interval_s[1] / p.time_interval_s[0])
        widths.setdefault(p.windows, []).append(width)
    assert len(widths) > 1
    assert min(widths[max(widths)]) < max(widths[min(widths)])


@pytest.mark.slow
@pytest.mark.searches
@pytest.mark.traces
def test_intervals_cover_the_recorded_truth_about_as_often_as_they_say(options):
    from tuner.recordings.table import load_table

    result = run_replay(TRACES / "kareus-attention-a100", **options, max_probes=40, seed=1)
    truth = {
        p.configuration: p for p in load_table(TRACES / "kareus-attention-a100").group().points
    }
    inside = [
        low <= 1000 * factor <= high
        for p in result.points
        for factor, (low, high) in (
            (truth[p.configuration].time_s, [1000 * x for x in p.time_interval_s]),
            (truth[p.configuration].energy_J, [1e6 * x for x in p.energy_interval_kJ]),
        )
    ]
    assert np.mean(inside) > 0.75


@pytest.mark.searches
@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("perseus-a100", "bert"),
        pytest.param("zeus-nsdi23", "shufflenetv2/adam, V100", marks=pytest.mark.long),
        pytest.param("kareus-attention-a100", None, marks=pytest.mark.slow),
    ],
)
def test_every_shipped_table_is_studied_to_a_front(options, name, group):
    result = run_replay(TRACES / name, group=group, **options, max_probes=8, in_flight=2)
    # A table of one launch is measured in one go, which today's launch begins.
    assert 1 <= result.spent.probes <= 8
    assert result.spent.measurements >= 4
    assert not result.failures
    assert len(result.front_points) >= 2
    assert result.best in result.front_points


# What it may spend.


@pytest.mark.parametrize(("budget_kJ", "capacity"), [(1.0, 3), (4.0, 1), (4.0, 3)])
def test_the_probe_budget_is_respected(options, capacity, budget_kJ):
    result = optimize(FormulaRunner(), options, capacity=capacity, probe_budget_kJ=budget_kJ)
    assert 0 < result.spent.energy_kJ <= budget_kJ
    assert "probe budget" in result.stopped or "would save" in result.stopped
    if result.spent.probes > 6:
        purposes = [
            r.request.purpose for r in read_trace(result.run_dir / "trace/probes.jsonl").records
        ]
        assert "verify" in purposes


def test_a_budget_below_one_probe_starts_none(options):
    runner = TalliedRunner(FormulaRunner())
    result = optimize(runner, options, probe_budget_kJ=1e-4)
    assert runner.asked == []
    assert (result.front_points, result.best, result.baseline) == ((), None, None)
    assert result.choice.met is False


@pytest.mark.searches
@pytest.mark.parametrize("count", [1, 5, pytest.param(11, marks=pytest.mark.slow)])
def test_the_number_of_probes_is_respected(options, count):
    runner = TalliedRunner(FormulaRunner())
    result = optimize(runner, options, capacity=2, max_probes=count)
    assert len(runner.asked) == result.spent.probes == count
    again = [r for r in runner.asked if r.purpose == "verify"]
    assert len(again) >= 1 or count < 11
    assert len({r.launch for r in runner.asked}) >= min(count, 5) - 2
    ids = [r.probe_id for r in runner.asked]
    assert len(set(ids)) == len(ids)


def test_no_probe_starts_after_the_time_is_over(options):
    result = optimize(FormulaRunner(), options, search_s=80.0)
    assert 30 < result.spent.time_s <= 80.0
    assert "its 80 s are over" in result.stopped


@pytest.mark.slow
@pytest.mark.searches
def test_with_no_limit_named_it_visits_eight_to_thirty_launches(options):
    """Of launches that nothing predicts; 24 to 29 over eight seeds, where 24 were wanted."""
    result = optimize(FormulaRunner(), options)
    launches = {p.configuration.launch for p in result.points}
    assert 7 <= len(launches) <= 30
    assert result.request.search.limits == {"max_probes": 40, "search_share": 0.01}


@pytest.mark.searches
def test_it_ends_when_nothing_is_worth_its_joules(table, options):
    result = run_replay(table, **options)
    assert "no point of the front is more than 1 % better than what was found" in result.stopped
    assert result.spent.probes < 30


@pytest.mark.slow
@pytest.mark.searches
def test_a_search_ends_when_a_probe_does_not_repay_itself_over_the_training(options):
    job = load_job("tiny-gpt")
    told = {}
    for name, steps in {"short": 20, "usual": 20_000, "long": 100_000_000}.items():
        options["name"] = name
        long_job = replace(job, steps=steps)
        executor = SimulatedExecutor(FormulaRunner(), capacity=1)
        told[name] = run_optimize(
            long_job, cluster="cpu-2", executor=executor, verify=False, max_probes=60, **options
        )
        assert told[name].spent.measurements >= LEAST_ROWS
    spent = {name: result.spent.measurements for name, result in told.items()}
    assert spent["short"] < spent["usual"] <= spent["long"]
    assert "kJ of the training" in told["short"].stopped
    taken, left = re.findall(r"([\d.e-]+) kJ", told["short"].stopped)
    assert float(left) < float(taken)


# Several in flight.


@pytest.mark.searches
@pytest.mark.slow
def test_several_in_flight_never_repeat_one_another_and_save_time(options, tmp_path):
    class Watched(SimulatedExecutor):
        most, measured = 0, frozenset()

        def submit(self, request, next_settings=None):
            flying = [c for f in self._heap for c in f.record.request.configurations()]
            if request.purpose == "search":
                assert not set(flying) & set(request.configurations())
                # Four slots, but once the start is out (two launches here, the baseline one of
                # them) few launches in flight beyond two fifths of those measured.
                count, known = (
                    len({c.launch for c in flying} | {request.launch}),
                    len(self.measured),
                )
                beyond = count - max(2, 0.4 * known)
                assert beyond / (known + count) <= 1 / count
            super().submit(request, next_settings)
            self.most = max(self.most, self.in_flight)

        def wait(self, timeout_s=None):
            record = super().wait(timeout_s)
            if record is not None and record.measurements:
                self.measured = self.measured | {record.request.launch}
            return record

    executor = Watched(FormulaRunner(), capacity=4)
    limits = {"cluster": "cpu-2", "max_probes": 9, "verify": False}
    together = run_optimize(LONG_JOB, executor=executor, **options, **limits)
    assert executor.most >= 3
    options["name"] = "serial"
    one = SimulatedExecutor(FormulaRunner(), capacity=1)
    alone = run_optimize(LONG_JOB, executor=one, **options, **limits)
    assert together.spent.time_s < 0.8 * alone.spent.time_s
    assert together.spent.probes == alone.spent.probes == 9


# Failures.


def test_failures_are_recorded_and_never_retried_for_ever(options):
    def spoil(request):
        if request.launch.get("zero_stage") == 3:
            return Failure("out_of_memory", "rank 0 ran out of memory", "Killed")
        if request.launch.get("micro_batch") == 1:
            return Failure("hang", "no step for 120 s")
        return None

    runner = TalliedRunner(FormulaRunner(), spoil)
    result = optimize(runner, options, max_probes=20)
    failed = [record.request.launch for record in result.failures]
    assert failed
    assert len(failed) == len(set(failed))
    assert result.spent.failed == len(failed)
    assert result.front_points
    assert all(spoil_free(p.configuration) for p in result.points)


def spoil_free(configuration):
    return configuration.zero_stage != 3 and configuration.micro_batch != 1


def test_when_everything_fails_the_study_ends_and_says_so(options):
    runner = TalliedRunner(FormulaRunner(), lambda r: Failure("crash", "no luck"))
    result = optimize(runner, options, max_probes=6)
    assert (result.spent.probes, result.spent.failed) == (6, 6)
    assert (result.front_points, result.best, result.baseline) == ((), None, None)
    assert "Nothing was measured" in result.choice.sentence


def test_a_failed_baseline_leaves_a_study_without_one(options):
    runner = TalliedRunner(
        FormulaRunner(), lambda r: Failure("crash", "no") if r.purpose == "baseline" else None
    )
    result = optimize(runner, options, max_probes=6)
    assert result.baseline is None
    assert result.spent.payback_steps is None
    assert result.front_points
    assert sum(r.purpose == "baseline" for r in runner.asked) == 1


def test_a_runner_that_raises_is_a_failed_probe(options):
    def spoil(request):
        if request.probe_id == "p0002":
            raise RuntimeError("boom")

    result = optimize(TalliedRunner(FormulaRunner(), spoil), options, max_probes=5)
    assert [r.failure.kind for r in result.failures] == ["crash"]
    assert result.spent.probes == 5


@pytest.mark.searches
def test_a_probe_that_measured_a_part_keeps_it(table, options, tmp_path):
    # A table that lacks some settings of a launch refuses those and measures the others.
    from tuner.problem.run_folder import RunFolder
    from tuner.problem.settings import SearchSettings
    from tuner.recordings.problem import recorded_problem
    from tuner.study.request import StudyRequest
    from tuner.study.session import Session

    problem, runner = recorded_problem(table)
    runner._points = {c: p for c, p in runner._points.items() if c.live["speed"] != 3}
    result = Session(
        problem,
        lambda announce: InlineExecutor(runner),
        StudyRequest(search=SearchSettings(max_probes=8, verify=False)),
        run=RunFolder.named(tmp_path / "runs", "part"),
    ).run()
    assert result.points
    partly = [r for r in result.failures if r.measurements]
    assert partly
    assert all(r.failure.kind == "refused" for r in partly)


# The choice.


def test_constraints_choose_and_do_not_cut(table, options):
    free = run_replay(table, **options, max_probes=8)
    fastest, last = free.front_points[0], free.front_points[-1]
    asked = (fastest.energy_to_solution_kJ + last.energy_to_solution_kJ) / 2
    options["name"] = "bound"
    bound = run_replay(table, **options, max_probes=8, budget_kJ=asked)
    fits = [p for p in bound.points if p.energy_to_solution_kJ <= asked]
    assert bound.best == min(fits, key=lambda p: p.time_to_solution_s)
    # What exceeds the budget stays in the answer, though the search did not look for it.
    assert any(p.energy_to_solution_kJ > asked for p in bound.points)
    assert bound.limits == Limits(budget_kJ=asked)
    assert bound.request.search.limits == {"max_probes": 8}


# Jobs, clusters, spaces.


def test_a_users_own_baseline_is_measured(options):
    mine = Configuration.of(data_parallel=2, micro_batch=1, zero_stage=1)
    result = optimize(FormulaRunner(), options, max_probes=3, baseline=mine)
    assert result.baseline.configuration.get("zero_stage") == 1
    assert result.baseline.configuration.micro_batch == 1
    with pytest.raises(InvalidConfiguration):
        optimize(FormulaRunner(), options, baseline=Configuration.of(data_parallel=64))


@pytest.mark.slow
@pytest.mark.searches
def test_clocks_are_swept_inside_a_launch_where_they_can_be_set(options):
    meter = METER.__class__("nvml", "gpu", "a test's counter")
    runner = TalliedRunner(FormulaRunner(meter, **EIGHT_GPUS))
    result = run_optimize(
        "opt-350m", cluster="a100-8", executor=SimulatedExecutor(runner), max_probes=8, **options
    )
    assert any(len(request.live) > 1 for request in runner.asked)
    assert len({p.configuration.live for p in result.points}) > 2
    assert result.spent.measurements > result.spent.probes


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "no-such-job"},
        {"cluster": "no-such-cluster"},
        {"space": "no-such-space"},
        {"executor": "cloud"},
        {"max_probes": 0},
        {"max_probes": 2.5},
        {"seed": -1},
        {"name": "../escape"},
        {"storage": "no-url"},
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(options, wrong):
    arguments = {"cluster": "cpu-2", "executor": "inline", **options, **wrong}
    with pytest.raises(InputError):
        run_optimize(**arguments)
    assert not options["runs_dir"].exists()


def test_the_answer_can_be_had_again_from_the_folder(finished_study):
    result = finished_study.result
    runs = result.run_dir.parent
    again = tuner.load_result("study", runs_dir=runs)
    assert [p.configuration for p in again.front_points] == [
        p.configuration for p in result.front_points
    ]
    assert again.best.configuration == result.best.configuration
    assert again.best.energy_to_solution_kJ == pytest.approx(
        result.best.energy_to_solution_kJ, rel=1e-3
    )
    assert again.spent.energy_kJ == pytest.approx(result.spent.energy_kJ)
    assert (again.stopped, again.request) == (result.stopped, result.request)
    assert again.spent.time_s == result.spent.time_s
    assert tuner.load_result(runs_dir=runs).name == "study"
    with pytest.raises(InputError, match="study"):
        tuner.load_result("other", runs_dir=runs)


def test_a_run_replays_as_a_trace(finished_study, options):
    first = finished_study.result
    replayed = run_replay(first.run_dir, runs_dir=options["runs_dir"], name="again", report=False)
    known = {p.configuration: p for p in first.points}
    assert replayed.steps == first.steps == LONG_JOB.steps
    assert replayed.points
    for p in replayed.points:
        assert p.time_to_solution_s == pytest.approx(
            known[p.configuration].time_to_solution_s, rel=0.06
        )
    assert replayed.baseline.configuration == first.baseline.configuration


def test_a_replay_announces_that_nothing_is_started(finished_study, options):
    first, notes = finished_study.result, []
    replayed = run_replay(
        first.run_dir,
        runs_dir=options["runs_dir"],
        name="quiet",
        report=False,
        on_progress=lambda event: notes.append(event.message) if event.kind == "note" else None,
    )
    said = " ".join(notes)
    assert replayed.cluster is not None  # whose search would be forecast
    name = first.run_dir.name
    assert re.search(rf"Replaying \d+ recorded configurations of {name}: nothing is started", said)
    assert "This search" not in said
    assert "clocks will be" not in said


def test_events_tell_the_story_in_order(finished_study):
    events = finished_study.events
    kinds = [event.kind for event in events]
    first = kinds.index("started")
    assert set(kinds[:first]) == {"note"}
    assert any(event.message.startswith("in play: ") for event in events[:first])
    assert kinds[first:] == ["started", "finished"] * 8
    done = [event for event in events if event.kind == "finished"]
    assert [event.probes for event in done] == list(range(1, 9))
    spent = [event.spent_kJ for event in done]
    assert spent == sorted(spent)
    assert all(event.front for event in done)


def test_the_report_and_the_launch_files_are_written(options):
    options["report"] = True
    result = optimize(FormulaRunner(), options, max_probes=2)
    assert result.report_path == result.run_dir / "report.html"
    assert result.report_path.is_file()
    assert (result.run_dir / "best" / "ds_config.json").is_file()


def test_without_a_compiler_offload_is_left_out_and_said(monkeypatch, tmp_path):
    from tests.support.studies import problem_of_job
    from tuner.search_spaces.cluster import load_cluster

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(
        "tuner.workload.node.platforms.detect_cluster", lambda: load_cluster("cpu-2")
    )
    installed = {"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja"}
    monkeypatch.setattr("tuner.workload.scripts.installed.shutil.which", installed.get)
    offloads = {c.get("optimizer_offload") for c in problem_of_job().candidates}
    assert offloads == {"none", "cpu"}
    installed.clear()
    problem = problem_of_job()
    assert {c.get("optimizer_offload") for c in problem.candidates} == {"none"}
    assert any("no C++ compiler" in note for note in problem.notes)


# Meters and threads.


def test_a_study_on_a_twin_is_marked_and_continues_on_no_other_meter(options):
    """A twin's figures are never a GPU's."""
    real = MeterInfo("nvml", "gpu", "NVML total-energy counter of 8 GPUs")
    twin = replace(real, source="NVML total-energy counter of 8 twin GPUs", twin=True)
    result = optimize(FormulaRunner(meter=twin), options, max_probes=2)
    assert {p.meter.mark for p in result.points} == {"twin"}
    assert "(twin)" in result.choice.sentence
    assert result.to_json()["points"][0]["meter"]["twin"] is True
    with pytest.raises(InputError, match=r"scope, twin\).*scope, metered\); give another"):
        optimize(FormulaRunner(meter=real), options, max_probes=3)
    again = tuner.load_result("study", runs_dir=options["runs_dir"])
    assert {p.meter.mark for p in again.points} == {"twin"}


def blas_threads() -> set[int]:
    np.linalg.eigvalsh(np.eye(3))  # loads the library
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


@pytest.mark.searches
def test_a_search_plans_in_one_thread_and_gives_the_others_back(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    plan = CandidatePlanner.plan

    def watched(self, *args, **kwargs):
        seen.append(blas_threads())
        return plan(self, *args, **kwargs)

    monkeypatch.setattr(CandidatePlanner, "plan", watched)
    with threadpool_limits(2):
        before = blas_threads()
        tuner.optimize(
            "opt-350m",
            cluster="a100-8",
            executor="simulated",
            search=tuner.SearchSettings(max_probes=2),
            runs_dir=tmp_path,
            report=False,
        )
        assert blas_threads() == before
    assert seen
    assert set.union(*seen) == {1}


def test_where_waiting_until_it_is_quiet_has_no_meaning_it_is_said_once(options):
    notes: list[str] = []
    optimize(
        FormulaRunner(),
        options,
        max_probes=2,
        wait_until_quiet=True,
        verify=False,
        on_progress=lambda event: notes.append(event.message) if event.kind == "note" else None,
    )
    assert sum("--wait-until-quiet looks at one node only" in each for each in notes) == 1


@pytest.mark.searches
def test_what_a_crash_teaches_is_said_after_it_and_once(options):
    crash = Failure("crash", "no compiler", frames=("deepspeed/ops/adam/cpu_adam.py:__init__",))
    told: list[str] = []
    optimize(
        TalliedRunner(
            FormulaRunner(),
            lambda request: crash if request.launch.get("optimizer_offload") == "cpu" else None,
        ),
        options,
        max_probes=12,
        verify=False,
        on_progress=lambda event: told.append(
            event.message if event.kind == "note" else event.kind
        ),
    )
    lessons = [i for i, words in enumerate(told) if "come first from now on" in words]
    assert lessons
    assert "optimizer_offload cpu" in told[lessons[0]]
    assert told[lessons[0] - 1] == "finished"
    assert len({told[i] for i in lessons}) == len(lessons)


def test_a_planner_that_waits_for_what_is_in_flight_ends_no_search(options, monkeypatch):
    class Waits(session.CandidatePlanner):
        def plan(self, state):
            return None if self._observe(state).pending else super().plan(state)

    monkeypatch.setattr(session, "CandidatePlanner", Waits)
    result = optimize(FormulaRunner(), options, capacity=2, max_probes=4, verify=False)
    assert result.spent.probes == 4
    assert "4 probes" in result.stopped


@pytest.fixture
def goes_on(options, monkeypatch):
    """Search with a planner that lets each launch go on to one more setting of 100 J, as planned;
    return the run's records."""

    def search(runner, *, capacity=1, first_J=100.0, **asked):
        class GoesOn(session.CandidatePlanner):
            def plan(self, state):
                plan = super().plan(state)
                return None if plan is None else replace(plan, extendable=True, first_J=first_J)

            def plan_continuation(self, state, so_far):
                if len(so_far.request.live) > 1:
                    return None
                first = self.candidates.find(so_far.request.configurations()[0])
                launch = self._members[self._launch_of[first]]
                (other, *_) = (row for row in launch if row != first)
                return self._plan_of([other], "another clock", expected_gain=1.0, cost_J=100.0)

        monkeypatch.setattr(session, "CandidatePlanner", GoesOn)
        result = run_optimize(
            "opt-350m",
            cluster="a100-8",
            executor=SimulatedExecutor(runner, capacity=capacity),
            verify=False,
            **options,
            **asked,
        )
        return read_trace(result.run_dir / "trace" / "probes.jsonl").records

    return search


def settings_of(records):
    return [len(each.measurements) for each in records]


def test_what_a_launch_was_to_cost_counts_the_settings_that_it_went_on_to(goes_on, monkeypatch):
    learned: list[float] = []
    monkeypatch.setattr(
        loop.CostEstimate, "learn", lambda self, record, planned_kJ: learned.append(planned_kJ)
    )
    records = goes_on(FormulaRunner(**EIGHT_GPUS), max_probes=2)
    assert settings_of(records) == [2, 2]
    assert learned[1] == pytest.approx(0.2)


@pytest.mark.parametrize(("left_kJ", "settings"), [(0.15, [2, 2]), (0.05, [2, 1])])
def test_a_launch_goes_on_within_what_is_left_of_the_budget(goes_on, left_kJ, settings, options):
    (today,) = goes_on(FormulaRunner(**EIGHT_GPUS), max_probes=1)
    budget_kJ = today.energy_J / 1000 + 2000.0 + left_kJ  # the launch takes less than planned
    options["name"] = "within"
    records = goes_on(
        FormulaRunner(**EIGHT_GPUS), first_J=2e6, probe_budget_kJ=budget_kJ, max_probes=2
    )
    assert settings_of(records) == settings


def test_a_launch_that_is_under_way_when_the_search_ends_goes_on_to_nothing(goes_on):
    records = goes_on(FormulaRunner(**EIGHT_GPUS), capacity=2, max_probes=4)
    assert settings_of(records) == [2, 2, 2, 1]


def test_as_many_probes_are_in_flight_as_there_are_nodes(options):
    executor = SimulatedExecutor(FormulaRunner(), capacity=2)
    flying: list[int] = []
    result = run_optimize(
        LONG_JOB,
        cluster="cpu-2",
        executor=executor,
        max_probes=5,
        verify=False,
        on_progress=lambda event: flying.append(executor.in_flight),
        **options,
    )
    assert result.spent.probes == 5
    assert max(flying) == 1  # a start is told before it counts


def test_a_lesson_that_was_told_is_not_told_again_after_the_next_failure():
    class Teaches:
        def lessons(self, records):
            return tuple(f"lesson {len(record.request.probe_id)}" for record in records[:1])

    failed = [replace(record(name), failure=Failure("crash", "no")) for name in ("p0", "p1")]
    assert loop._new_lessons(Teaches(), failed[:1]) == ["lesson 2"]
    assert loop._new_lessons(Teaches(), failed) == []


def test_the_records_of_a_search_are_made_small_and_those_of_verification_kept_whole(
    options, monkeypatch
):
    small: list[str] = []

    def note(each):
        small.append(each.request.purpose)
        return each

    monkeypatch.setattr(loop, "compact", note)
    result = optimize(FormulaRunner(), options, max_probes=8)
    assert set(small) == {"search"}
    assert result.spent.probes > len(small)
