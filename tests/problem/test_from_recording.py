"""Problems of recorded tables and traces, whose job may have an unknown length or be absent."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.scripts import CPU, script_job
from tests.support.studies import record, write_table
from tuner.problem.from_job import identity_of
from tuner.problem.problem import Problem, space_section
from tuner.problem.run_folder import RunFolder
from tuner.problem.study_spec import StudySpec
from tuner.recordings.problem import recorded_problem
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.study.load import load_spec
from tuner.workload.records.trace import TraceWriter
from tuner.workload.scripts.script_facts import ScriptFacts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return the run of a script whose length is unknown, with one probe."""
    folder = RunFolder.named(tmp_path, "script")
    job = script_job("train.py", tmp_path, ScriptFacts("torch"), steps=None, global_batch=0)
    today = Configuration.of({"data_parallel": 2, "micro_batch": 4})
    candidates = Candidates.from_configurations([today])
    problem = Problem(
        name=job.name,
        candidates=candidates,
        steps=1,
        baseline=today,
        identity=identity_of(job, CPU, space_section("script", candidates)),
        job=job,
        cluster=CPU,
    )
    folder.write_study(StudySpec("script", folder.path, problem).to_toml())
    with closing(TraceWriter(folder.trace)) as trace:
        trace.append(record())
    return folder


def test_a_trace_of_unknown_length_is_of_one_step(run: RunFolder) -> None:
    problem, _ = recorded_problem(run.path)
    assert (problem.steps, problem.length) == (1, None)


def test_steps_given_for_a_trace_of_unknown_length_are_its_length(run: RunFolder) -> None:
    problem, _ = recorded_problem(run.path, steps=50)
    assert (problem.steps, problem.length) == (50, 50)
    again = RunFolder.named(run.path.parent, "again")
    again.write_study(StudySpec("again", again.path, problem).to_toml())
    assert load_spec(again, ()).problem.length == 50


def test_a_table_has_the_length_of_what_was_recorded(tmp_path: Path) -> None:
    problem, _ = recorded_problem(write_table(tmp_path))
    assert (problem.steps, problem.length, problem.job) == (1, 1, None)
