"""The Optuna study: what a trial holds, storages that fail, resume after a crash at any point."""

import json
import os
import time

import optuna
import pytest
from optuna.trial import TrialState

import tuner
from tests.support.studies import (
    LONG_JOB,
    METER,
    FormulaRunner,
    TalliedRunner,
    run_optimize,
    run_replay,
    write_table,
)
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder, find_run, write_toml
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import load_space
from tuner.study.recorder import METRICS, StudyRecorder, open_storage, storage_name
from tuner.study.session import Interrupted
from tuner.workload.records.probe import Failure, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import TraceWriter, read_trace

pytestmark = pytest.mark.usefixtures("next_candidates")


@pytest.fixture
def options(tmp_path):
    return {
        "job": LONG_JOB,
        "cluster": "cpu-2",
        "runs_dir": tmp_path / "runs",
        "name": "study",
        "report": False,
        "max_probes": 8,
    }


@pytest.fixture
def run(options):
    return RunFolder(options["runs_dir"] / "study")


@pytest.fixture
def finished(finished_study, options):
    """The study of `options`, as it stands after its eight probes."""
    finished_study.copy_into(options["runs_dir"])
    return finished_study.result


def optimize(runner, options, *, capacity=1, **more):
    executor = SimulatedExecutor(runner, capacity=capacity)
    return run_optimize(executor=executor, **{**options, **more})


def load(run: RunFolder, storage=None) -> optuna.Study:
    return optuna.load_study(study_name=run.name, storage=open_storage(storage, run.journal))


def trials(run, state, storage=None):
    return load(run, storage).get_trials(states=(state,))


# What a trial holds.


def test_one_trial_a_measurement_with_flat_figures(options, run):
    result = optimize(FormulaRunner(), options, budget_kJ=10.0, deadline_s=1e9)
    study = load(run)
    assert study.metric_names == list(METRICS)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert len(complete) == result.spent.measurements
    records = {r.request.probe_id: r for r in read_trace(run.trace).records}
    for trial in complete:
        attrs = trial.user_attrs
        (m,) = records[attrs["probe_id"]].measurements
        assert trial.values == pytest.approx(
            [m.power_W * m.step_time_s * LONG_JOB.steps / 1000, m.step_time_s * LONG_JOB.steps]
        )
        assert attrs["power_W"] == m.power_W
        assert attrs["step_time_rse"] == pytest.approx(0.01)
        assert "power_rse" not in attrs  # unknown: left out, for JSON has no NaN
        assert (attrs["scope"], attrs["estimated"]) == ("node", True)
        assert all(isinstance(v, str | int | float | bool) for v in attrs.values())
        constraints = trial.constraints
        assert constraints["budget_kJ"] == pytest.approx(trial.values[0] / 10.0 - 1)
        assert constraints["deadline_s"] < 0
        lasted_s = (trial.datetime_complete - trial.datetime_start).total_seconds()
        assert lasted_s == pytest.approx(records[attrs["probe_id"]].wall_s, abs=1e-3)
    feasible = {trial.number for trial in study.best_trials}
    assert feasible <= {t.number for t in complete if t.values[0] <= 10.0}


def test_without_constraints_none_are_written(finished, run):
    assert not any(t.constraints for t in load(run).get_trials())


def test_failed_probes_are_failed_trials_that_say_why(options, run):
    spoil = {"p0001": Failure("out_of_memory", "rank 1 ran out of memory")}
    optimize(TalliedRunner(FormulaRunner(), lambda r: spoil.get(r.probe_id)), options)
    (failed,) = trials(run, TrialState.FAIL)
    assert failed.user_attrs["failure"] == "out_of_memory"
    assert failed.user_attrs["failure_message"] == "rank 1 ran out of memory"
    assert failed.user_attrs["probe_id"] == "p0001"


def test_the_record_is_on_disk_before_the_study_is_told(options, run, monkeypatch):
    add = StudyRecorder.add

    def checked(self, record):
        names = [r.request.probe_id for r in read_trace(run.trace).records]
        assert names[-1] == record.request.probe_id
        add(self, record)

    monkeypatch.setattr(StudyRecorder, "add", checked)
    assert optimize(FormulaRunner(), options, max_probes=3).spent.probes == 3


@pytest.mark.searches
def test_probes_in_flight_have_no_trial_yet(options, run):
    seen = []

    class Watched(SimulatedExecutor):
        def wait(self, timeout_s=None):
            if run.trace.exists():
                kept = read_trace(run.trace).records
                seen.append((self.in_flight, len(kept), len(load(run).trials)))
            return super().wait(timeout_s)

    run_optimize(executor=Watched(FormulaRunner(), capacity=3), **options)
    # Two at the start, and half of the launches measured, five at most here, come to two: the third
    # slot stays empty.
    assert max(flying for flying, _, _ in seen) == 2
    assert all(records == trials for _, records, trials in seen)


# Resume.


class Crash(BaseException):
    """What a dead driver looks like from inside: nothing after it runs."""


def crash_at(monkeypatch, where, number):
    """Make the driver die at one point of the life of its probe `number` (0 is the first)."""
    targets = {
        "before submit": (SimulatedExecutor, "submit", False),
        "before append": (TraceWriter, "append", False),
        "after append": (TraceWriter, "append", True),
        "before the trials": (StudyRecorder, "add", False),
        "after the trials": (StudyRecorder, "add", True),
    }
    cls, name, after = targets[where]
    original, calls = getattr(cls, name), []

    def wrapped(self, *arguments):
        calls.append(arguments)
        if len(calls) != number + 1:
            return original(self, *arguments)
        if after:
            original(self, *arguments)
        raise Crash(where)

    monkeypatch.setattr(cls, name, wrapped)


@pytest.mark.parametrize(
    ("where", "number", "capacity"),
    [  # each pair of the three
        ("before submit", 0, 1),
        ("before submit", 3, 3),
        ("before append", 0, 3),
        ("before append", 3, 1),
        ("after append", 0, 1),
        ("after append", 3, 3),
        ("before the trials", 0, 3),
        ("before the trials", 3, 1),
        ("after the trials", 0, 3),
        ("after the trials", 3, 1),
    ],
)
def test_a_crash_anywhere_repeats_no_finished_probe(
    options, run, monkeypatch, where, number, capacity
):
    options["max_probes"] = 6
    runner = TalliedRunner(FormulaRunner())
    with monkeypatch.context() as patch:
        crash_at(patch, where, number)
        with pytest.raises(Crash):
            optimize(runner, options, capacity=capacity)
    kept = read_trace(run.trace).records
    if where != "before submit":  # where several fly, some are asked for before others end
        assert len(kept) == number + (where != "before append")
    first = len(runner.asked)

    result = optimize(runner, options, capacity=capacity)

    finished = {c for r in kept for c in r.request.configurations()}
    # Today is launched again on purpose.
    asked = [r for r in runner.asked[first:] if r.purpose != "verify"]
    again = {c for r in asked for c in r.configurations()}
    assert not finished & again
    assert {r.request.probe_id for r in kept}.isdisjoint(r.probe_id for r in runner.asked[first:])
    # The trace and the study say the same.
    records = read_trace(run.trace).records
    assert records[: len(kept)] == kept
    assert result.spent.probes == len(records) == 6
    told = sorted(
        (t.user_attrs["probe_id"], t.user_attrs["configuration"])
        for t in trials(run, TrialState.COMPLETE)
    )
    assert told == sorted(
        (r.request.probe_id, c.key) for r in records for c in r.request.configurations()
    )
    assert len(load(run).trials) == len(told)
    powers = {r.request.probe_id: r.measurements[0].power_W for r in records}
    for trial in trials(run, TrialState.COMPLETE):
        assert trial.user_attrs["power_W"] == powers[trial.user_attrs["probe_id"]]


def test_an_interrupt_keeps_what_was_told_and_goes_on(options, run):
    def spoil(request):
        if request.probe_id == "p0004":
            raise KeyboardInterrupt

    runner = TalliedRunner(FormulaRunner(), spoil)
    with pytest.raises(Interrupted) as caught:
        optimize(runner, options)
    assert caught.value.run.path == run.path
    assert runner.closed
    assert len(trials(run, TrialState.COMPLETE)) == 4
    assert not trials(run, TrialState.RUNNING)
    assert tuner.load_result("study", runs_dir=options["runs_dir"]).stopped == "It was interrupted."
    resumed = TalliedRunner(FormulaRunner())
    result = optimize(resumed, options)
    assert len(resumed.asked) == 4
    assert result.spent.probes == 8
    # What was interrupted blames nobody: its configuration may be asked again.
    assert {r.launch for r in resumed.asked} & {runner.asked[4].launch}


def test_a_finished_study_asked_again_probes_nothing(finished, options, run):
    runner = TalliedRunner(FormulaRunner())
    again = optimize(runner, options, budget_kJ=20.0)
    assert runner.asked == []
    assert [p.configuration for p in again.points] == [p.configuration for p in finished.points]
    assert again.choice.rule == "budget_kJ"  # constraints only choose: they may change
    asked = run.read_study()
    assert asked["job"]["global_batch"] == 8
    assert json.loads(asked["job"]["model"])["model_type"]
    assert asked["cluster"]["device"]["name"] == "cpu-core"
    assert asked["constraints"] == {"budget_kJ": 20.0}
    assert asked["settings"]["max_probes"] == 8
    assert asked["versions"]["optuna"] == optuna.__version__
    assert asked["ended"]["time_s"] > 0


def test_more_probes_may_be_asked_for_later(finished, options):
    runner = TalliedRunner(FormulaRunner())
    result = optimize(runner, options, max_probes=10)
    assert len(runner.asked) == 2
    assert result.spent.probes == 10
    assert result.spent.time_s > finished.spent.time_s + 2 * 5.0


def test_a_torn_journal_and_a_torn_trace_are_mended(finished, options, run):
    for path in (run.journal, run.trace):
        data = path.read_bytes()
        path.write_bytes(data[:-30])
    notes = []
    result = optimize(
        FormulaRunner(),
        options,
        on_progress=lambda e: notes.append(e.message) if e.kind == "note" else 0,
    )
    assert result.spent.probes == 8
    assert any("torn" in note for note in notes)
    assert run.trace.with_name("probes.jsonl.torn").exists()
    assert not trials(run, TrialState.RUNNING)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"job": "opt-350m"}, "job"),
        ({"cluster": "a100-8"}, "cluster"),
        ({"space": "clocks"}, "space"),
    ],
)
def test_another_question_under_the_same_name_is_refused(finished, options, run, change, told):
    before = run.trace.read_bytes()
    with pytest.raises(InputError, match=f"another question.*{told}.*another name"):
        optimize(FormulaRunner(), {**options, **change})
    assert run.trace.read_bytes() == before


def test_what_a_user_enqueues_does_not_disturb_the_search(options, run):
    optimize(FormulaRunner(), options, max_probes=3)
    study = load(run)
    other = next(t.params for t in study.get_trials() if t.params != study.get_trials()[0].params)
    study.enqueue_trial(other)
    study.enqueue_trial({"micro_batch": 1})
    study.ask()  # the second is left waiting
    runner = TalliedRunner(FormulaRunner())
    assert optimize(runner, options, max_probes=6).spent.probes == 6
    assert len(runner.asked) == 3
    # The user's own trials stay as they are.
    assert len(trials(run, TrialState.WAITING)) == len(trials(run, TrialState.RUNNING)) == 1
    records = {r.request.probe_id: r for r in read_trace(run.trace).records}
    for trial in trials(run, TrialState.COMPLETE):
        (told,) = records[trial.user_attrs["probe_id"]].request.configurations()
        assert all(str(told.get(name)) == str(value) for name, value in trial.params.items())


def test_another_meter_under_the_same_name_is_refused(finished, options):
    for other in (MeterInfo("nvml", "gpu", "counter"), MeterInfo("rapl", "node", "counter")):
        with pytest.raises(InputError, match="meter"):
            optimize(FormulaRunner(meter=other), options)


def test_a_second_driver_alive_is_refused(finished, options, run):
    with run.locked(), pytest.raises(InputError, match=f"process {os.getpid()}"):
        optimize(FormulaRunner(), options)
    assert optimize(FormulaRunner(), options).spent.probes == 8


# Storages.


def test_a_database_by_url_holds_the_study(options, run, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    result = optimize(FormulaRunner(), options, storage=url, max_probes=4)
    assert not run.journal.exists()
    assert len(trials(run, TrialState.COMPLETE, url)) == result.spent.measurements
    runner = TalliedRunner(FormulaRunner())
    optimize(runner, options, storage=url)
    assert len(runner.asked) == 4


def test_a_run_that_changes_its_storage_says_so(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    url = "sqlite:///my study.db"

    def again(storage):
        said.clear()
        optimize(
            FormulaRunner(),
            {
                **options,
                "storage": storage,
                "on_progress": lambda event: said.append(event.message),
            },
            max_probes=2,
        )
        return [sentence for sentence in said if "differs from the last one" in sentence]

    assert not again(url)
    assert not again(url)
    (sentence,) = again(None)
    there = f"storage was sqlite:///{tmp_path / 'my study.db'} and is the journal in the run folder"
    assert there in sentence
    assert not again(None)
    (sentence,) = again(url)
    monkeypatch.chdir(tmp_path.parent)  # the same words are another file here
    (sentence,) = again(url)
    assert str(tmp_path.parent / "my study.db") in sentence


def test_a_limit_that_is_not_given_again_is_named(options, tmp_path):
    said: list[str] = []
    receive = {"on_progress": lambda event: said.append(event.message)}
    optimize(
        FormulaRunner(),
        {**options, **receive},
        max_probes=2,
        constraints=Constraints(deadline_s=9e6),
    )
    assert not any("differs from" in sentence for sentence in said)
    optimize(FormulaRunner(), {**options, **receive}, max_probes=3)
    assert any("deadline_s was 9000000.0 and is not given" in sentence for sentence in said)


def test_the_name_of_a_storage_has_no_secret():
    url = "postgresql://me:secret@db.example/tunes?password=secret"
    assert storage_name(url) == "postgresql://db.example/tunes"


def test_a_second_driver_of_a_study_is_refused_and_the_first_goes_on(options, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    one = {**options, "storage": url, "runs_dir": tmp_path / "one"}
    two = {**options, "storage": url, "runs_dir": tmp_path / "two"}

    def spoil(request):
        if request.probe_id == "p0002":  # while the first has a probe in flight
            with pytest.raises(InputError, match="of another run folder; continue"):
                optimize(FormulaRunner(), two)

    result = optimize(TalliedRunner(FormulaRunner(), spoil), one, max_probes=5)
    assert result.spent.probes == 5
    first = RunFolder(tmp_path / "one" / "study")
    assert len(trials(first, TrialState.COMPLETE, url)) == 5
    assert not trials(first, TrialState.FAIL, url)
    assert not read_trace(tmp_path / "two" / "study" / "trace" / "probes.jsonl").records
    # Under another name the database holds both.
    assert optimize(FormulaRunner(), {**two, "name": "other"}, max_probes=2).spent.probes == 2


def test_a_trace_that_lost_its_last_probe_is_continued(options, run, tmp_path):
    """Its study has a measurement more, in a database, too."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    for storage in (None, url):
        more = {**options, "storage": storage, "name": "own" if storage is None else "shared"}
        optimize(FormulaRunner(), more, max_probes=2)
        trace = RunFolder(options["runs_dir"] / more["name"]).trace
        trace.write_bytes(trace.read_bytes()[:-30])
        assert optimize(FormulaRunner(), more, max_probes=3).spent.probes == 3


def test_a_configuration_that_the_study_cannot_have_is_refused_at_once(options):
    candidates = load_space("default").candidates(LONG_JOB, load_cluster("cpu-2"))
    recorder = StudyRecorder(
        name="study",
        storage=optuna.storages.InMemoryStorage(),
        candidates=candidates,
        steps=1,
        constraints=Constraints(),
    )
    foreign = Settings({**candidates.launches[0], "micro_batch": 4096})
    request = ProbeRequest("p0000", foreign, (Settings({}),))
    with pytest.raises(InputError, match="which is none of the study's conf"):
        recorder.add(ProbeRecord(request, (), METER))
    assert not recorder.study.get_trials()


def test_a_journal_without_its_study_toml_is_continued(options, run):
    optimize(FormulaRunner(), options, max_probes=2)
    run.study_file.unlink()
    assert optimize(FormulaRunner(), options, max_probes=3).spent.probes == 3


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "not a URL"),
        ("", "not a URL"),
        ("sqlite:////no/such/folder/study.db", "cannot be opened"),
        ("nosuch://host/db", "cannot be opened"),
        ("postgresql://user:secret@127.0.0.1:1/db", "driver|cannot be opened"),
        ("mysql+nosuchdriver://127.0.0.1/db", "driver|cannot be opened"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_one_sentence(finished, options, run, url, told):
    before = run.trace.read_bytes()
    with pytest.raises(InputError, match=told) as caught:
        optimize(FormulaRunner(), options, storage=url)
    assert "secret" not in str(caught.value)
    assert run.trace.read_bytes() == before


def test_a_storage_that_fails_midway_loses_nothing(options, run, monkeypatch, tmp_path):
    from optuna.exceptions import StorageInternalError

    url = f"sqlite:///{tmp_path / 'study.db'}"
    original, calls = optuna.Study.add_trial, []

    def add_trial(self, *arguments, **more):
        calls.append(arguments)
        if len(calls) >= 3:
            raise StorageInternalError("the server went away\nsomewhere")
        return original(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "add_trial", add_trial)
        with pytest.raises(InputError, match="stopped answering"):
            optimize(FormulaRunner(), options, storage=url)
    assert len(read_trace(run.trace).records) == 3
    runner = TalliedRunner(FormulaRunner())
    result = optimize(runner, options, storage=url, max_probes=5)
    assert result.spent.probes == 5
    assert len(runner.asked) == 2
    assert len(trials(run, TrialState.COMPLETE, url)) == 5


def test_a_study_of_that_name_about_something_else_is_refused(options, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(study_name="study", storage=url, direction="minimize")
    with pytest.raises(InputError, match="already holds a study"):
        optimize(FormulaRunner(), options, storage=url)
    options["name"] = "mine"
    optimize(FormulaRunner(), options, storage=url, max_probes=2)
    options["runs_dir"] = tmp_path / "elsewhere"
    with pytest.raises(InputError, match="already holds a study"):
        optimize(FormulaRunner(), {**options, "space": "clocks"}, storage=url)


# The run folder.


def test_toml_is_read_back_as_it_was_written():
    import tomllib

    data = {
        "text": 'quotes " and \\ and\nlines, \x7f and \u00e9 \U0001f600',
        "number": 3,
        "share": 1e-9,
        "none": None,
        "yes": True,
        "list": [1, 2.5, "x"],
        "a key": {"deeper": {"odd.key": (1, 2)}, "empty": {}},
    }
    assert tomllib.loads(write_toml(data)) == {
        "text": data["text"],
        "number": 3,
        "share": 1e-9,
        "yes": True,
        "list": [1, 2.5, "x"],
        "a key": {"deeper": {"odd.key": [1, 2]}, "empty": {}},
    }


def test_the_latest_run_is_found_and_an_unknown_one_is_not(tmp_path):
    with pytest.raises(InputError, match="no run"):
        find_run(None, tmp_path)
    for age, name in ((200, "old"), (100, "new")):
        folder = RunFolder.named(tmp_path, name)
        folder.write_study({"name": name})
        stamp = time.time() - age
        os.utime(folder.study_file, (stamp, stamp))
    assert find_run(None, tmp_path).name == "new"
    assert find_run("old", tmp_path).name == "old"
    assert find_run(tmp_path / "old", "elsewhere").name == "old"
    with pytest.raises(InputError, match="new, old"):
        find_run("none", tmp_path)


def test_a_folder_that_cannot_be_made_is_said(options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot"):
        optimize(FormulaRunner(), {**options, "runs_dir": tmp_path / "file"})


def test_a_table_resumes_like_a_job(tmp_path):
    table = write_table(tmp_path / "t")
    options = {"runs_dir": tmp_path / "runs", "name": "r", "report": False}
    run_replay(table, **options, max_probes=3)
    assert run_replay(table, **options, max_probes=5).spent.probes == 5
    with pytest.raises(InputError, match="steps was 1 and is 7"):
        run_replay(table, **options, max_probes=5, steps=7)
    assert METER.estimated  # the other meters of this file are the table's own
