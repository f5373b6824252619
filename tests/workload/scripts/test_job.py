"""Contract of jobs: the built-in program, a user's own in its place, a script and a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import CPU, script_job
from tests.support.studies import problem_of_job, record, run_optimize, write_table
from tuner.problem.problem import Recording
from tuner.recordings.problem import recorded_problem
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.program.built_in_job import BuiltInJob
from tuner.workload.records.trace import TraceWriter
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job import LaunchableJob, launchable
from tuner.workload.scripts.script_facts import ScriptFacts

TINY = load_job("tiny-gpt")


def _built_in(folder: Path) -> LaunchableJob:
    return launchable(TINY, CPU)


def _own_program(folder: Path) -> LaunchableJob:
    (folder / "mine.py").touch()
    return launchable(TINY, CPU).with_program(Script("mine.py --data D", cwd=folder))


def _script(folder: Path) -> LaunchableJob:
    frame = ScriptFacts("torch", micro_batch=4, accumulation=1)
    return script_job("train.py --lr 0.1", folder, frame)


def _unknown_script(folder: Path) -> LaunchableJob:
    """Return a script of unknown length, batch and model, as a plain loop is."""
    return script_job("train.py", folder, ScriptFacts("torch"), steps=None, global_batch=0)


def _module(folder: Path) -> LaunchableJob:
    package = folder / "package"
    package.mkdir()
    (package / "__main__.py").touch()
    return script_job("python -m package --once", folder, ScriptFacts("torch"), steps=1)


JOBS = (_built_in, _own_program, _script, _unknown_script, _module)


@pytest.fixture(params=JOBS, ids=lambda make: make.__name__.strip("_"))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> LaunchableJob:
    make: Callable[[Path], LaunchableJob] = request.param
    return make(tmp_path)


def test_a_job_says_what_it_is(job: LaunchableJob) -> None:
    assert job.steps is None or job.steps >= 1
    assert job.facts.steps == job.steps
    assert job.knobs == job.facts.knobs
    assert launchable(job.facts, CPU).shown


def test_today_is_a_configuration_that_it_can_run(job: LaunchableJob) -> None:
    today = job.today()
    assert today.world_size == job.ranks_today == 2
    assert job.refused(today) == []
    assert job.binding(today) == ""


def test_its_ranks_start_with_the_files_of_the_configuration(
    job: LaunchableJob, tmp_path: Path
) -> None:
    for probe in (True, False):
        start = job.start(job.today(), tmp_path / f"probe {probe}", probe=probe)
        assert start.argv(0, 2)
        assert Path(start.cwd).is_dir()
        for word in start.words:  # a path that it names is one that it wrote
            if word.endswith("ds_config.json"):
                assert (Path(start.cwd) / word).is_file()


def test_a_recording_is_kept_in_place_of_a_job(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace" / "probes.jsonl") as trace:
        trace.append(record())
    for path in (write_table(tmp_path / "table"), tmp_path):
        job = recorded_problem(path)[0].recording
        assert job is not None
        assert job.name
        assert job.steps is not None
        again = Recording.of({"recorded": plain(job.to_json())})
        assert again == job
    assert Recording.of({"job": {}}) is None
    with pytest.raises(InputError, match="steps"):
        Recording.of({"recorded": {"trace": "t", "steps": "many"}})


def test_a_training_has_the_length_of_its_job(tmp_path: Path) -> None:
    short = BuiltInJob(replace(TINY, steps=1), CPU)
    assert short.start(short.today(), tmp_path, probe=False).steps == 1
    assert "--steps" in short.start(short.today(), tmp_path).words  # of a probe, which is ended
    script = _unknown_script(tmp_path)
    assert script.start(script.today(), tmp_path / "probe", probe=False).steps is None


def test_a_configuration_that_does_not_divide_the_batch_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        launchable(TINY, CPU).start(Configuration.of(micro_batch=3), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("launchers_here")
def test_the_users_program_keeps_its_folder_and_has_no_launcher(tmp_path: Path) -> None:
    own = _own_program(tmp_path)
    assert own.start(own.today(), tmp_path / "probe").cwd == str(tmp_path)
    with pytest.raises(InputError, match="without a launcher"):
        launchable(TINY, CPU).with_program(Script("torchrun mine.py", cwd=tmp_path))


def test_a_script_trains_by_another_command(tmp_path: Path) -> None:
    job = _script(tmp_path)
    (tmp_path / "other.py").touch()
    other = job.with_program(Script("other.py --epochs 3", cwd=tmp_path))
    assert other.start(other.today(), tmp_path / "probe").words[:3] == ("other.py", "--epochs", "3")


@pytest.fixture
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no built-in program, as where its folder is deleted."""
    monkeypatch.setattr("tuner.workload.scripts.job.shipped_module", lambda name: None)


@pytest.mark.usefixtures("no_program")
def test_without_the_built_in_program_a_script_is_as_before_and_a_model_is_predicted_alone(
    tmp_path: Path,
) -> None:
    script = _script(tmp_path)
    assert launchable(script.facts, CPU) is script
    job = launchable(TINY, CPU)
    assert not isinstance(job, BuiltInJob)
    assert job.today() == BuiltInJob(TINY, CPU).today()
    assert problem_of_job(TINY, "cpu-2", predicted=True).candidates
    for use in (
        lambda: job.start(job.today(), tmp_path),
        lambda: job.with_program(Script("mine.py", cwd=tmp_path)),
        lambda: problem_of_job(TINY, "auto"),
        lambda: run_optimize(TINY, cluster="cpu-2", runs_dir=tmp_path, max_probes=1),
    ):
        with pytest.raises(InputError, match=r"tiny-gpt.*built-in program.*install all parts"):
            use()
    assert not "".join(p.read_text() for p in tmp_path.glob("*/trace/probes.jsonl"))
