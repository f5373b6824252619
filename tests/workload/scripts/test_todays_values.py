"""Today's values that the command must say, and what stays unknown without a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.scripts import CPU, script_job
from tests.support.studies import problem_of_job
from tuner.answer.state import StudyState
from tuner.cli.main import main
from tuner.problem.constraints import Constraints
from tuner.problem.from_job import baseline_of
from tuner.search.joint_draws import RegretEstimate
from tuner.search.planner import ProbePlan
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import steps_a_job_step
from tuner.search_spaces.knob_declarations import Knob
from tuner.study.request import StudyRequest
from tuner.study.rules import not_repaid, reason_to_stop
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.script_facts import ScriptFacts

SOURCE = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--eval-batch-size", type=int, default=64)
p.add_argument("-b", "--batch-size", type=int, default=32)
p.add_argument("--accum", type=int, default=4)
p.add_argument("--bucket", default=25)
"""
ONE = replace(CPU, devices_per_node=1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-b{micro_batch}", "{micro_batch} does not say what you use today; write {micro_batch="),
        (
            "-b {micro_batch} --accum {gradient_accumulation}",
            "write {micro_batch=VALUE} {gradient_accumulation=VALUE} with the value that you use",
        ),
        ("--bucket {bucket}", "write {bucket=VALUE} with the value"),
        ("--zero {zero_stage}", "write {zero_stage=VALUE} with the value"),
    ],
)
def test_a_bare_placeholder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    knob = ["--knob", "bucket=1,25"] if "bucket" in words else []
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert main(["optimize", *runs, *knob, "--script", f"{script} {words}"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_what_the_user_states_elsewhere_is_no_guess(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE)
    both = "train.py -b {micro_batch} --accum {gradient_accumulation}"
    script = Script(both, cwd=tmp_path).stating(["micro_batch=32", "gradient_accumulation=4"])
    job = blank_job(script, ONE)
    assert (job.baseline.micro_batch, job.frame.accumulation, job.global_batch) == (32, 4, 128)
    known = "train.py -b {micro_batch} --accum {gradient_accumulation=4}"
    job = blank_job(Script(known, cwd=tmp_path, global_batch=128), ONE)
    assert (job.baseline.micro_batch, job.frame.accumulation) == (32, 4)
    # The global batch alone does not say how it is split.
    with pytest.raises(InputError, match=r"write \{micro_batch=VALUE\} \{gradient_acc"):
        blank_job(Script(both, cwd=tmp_path, global_batch=128), ONE)
    own = Knob("bucket", (1, 25), baseline=25)
    assert (
        blank_job(
            Script("train.py --bucket {bucket}", cwd=tmp_path, knobs=(own,)), ONE
        ).baseline.launch["bucket"]
        == 25
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train.py --bs {micro_batch=4} --eval-bs {micro_batch=8}", "{micro_batch} is 4 and 8"),
        ("train.py --bs {micro_batch=4} ds.json", "{micro_batch=4}, and its DeepSpeed .* 2;"),
        (
            "train.py --accum {gradient_accumulation=8} ds.json",
            "{gradient_accumulation=8}, and its DeepSpeed configuration 4;",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    tmp_path: Path, command: str, words: str
) -> None:
    (tmp_path / "train.py").touch()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        blank_job(Script(command, cwd=tmp_path), ONE)


def test_the_same_value_may_stand_twice(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = "train.py --bs {micro_batch=4} --eval-bs {micro_batch=4}"
    assert blank_job(Script(command, cwd=tmp_path), ONE).frame.micro_batch == 4


def test_a_command_that_says_nothing_leaves_batch_and_length_unknown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE)
    job = blank_job(Script("train.py", cwd=tmp_path), ONE)
    assert (job.global_batch, job.frame.micro_batch, job.frame.accumulation) == (0, 0, 0)
    assert job.steps is None
    assert "micro_batch" not in job.baseline.launch
    asked = job.start(job.baseline, tmp_path / "probe").options["configuration"]
    # A script that reads them by configuration().get(NAME, OWN) trains as it does today.
    assert not {"micro_batch", "gradient_accumulation"} & set(asked)
    assert steps_a_job_step(job.baseline, job) == 1.0


def unknown(folder: Path, **changes: object) -> StudyRequest:
    knobs = (Knob("pause", (1, 2), how="env:GLOO_PAUSE"),)
    job = script_job("train.py", folder, ScriptFacts("torch"), knobs, steps=None, global_batch=0)
    return StudyRequest(
        job, CPU, constraints=Constraints(**changes), executor="inline", name="s", runs_dir=folder
    )


@pytest.mark.parametrize("limit", [{"budget_kJ": 5.0}, {"deadline_s": 60.0}])
def test_a_limit_on_a_training_of_unknown_length_is_refused(
    tmp_path: Path, limit: dict[str, float]
) -> None:
    with pytest.raises(InputError, match="length is unknown; add --steps with"):
        unknown(tmp_path, **limit).inspected_problem(None)
    problem, _, _ = unknown(tmp_path, max_slowdown=0.05).inspected_problem(None)
    assert (problem.steps, problem.length) == (1, None)


@pytest.mark.parametrize("steps", [None, 10])
def test_only_a_known_length_ends_a_search(tmp_path: Path, steps: int | None) -> None:
    from tests.study.test_rules import spec_of
    from tests.support.studies import record

    job = script_job("train.py", tmp_path, ScriptFacts("torch"), steps=steps)
    spec = spec_of(tmp_path)
    spec = replace(spec, problem=replace(spec.problem, job=job, steps=steps or 1))
    state = StudyState(spec, [record()])
    regret = RegretEstimate(np.full(8, 0.5))
    plan = ProbePlan((job.baseline,), "", expected_gain=1.0, regret=regret)
    for ends in (not_repaid(state, plan, 1e9), reason_to_stop(state, plan, 1e9)):
        assert (ends is not None) == bool(steps)
    assert all(point.of_step == (not steps) for point in state.points)


def test_baseline_changes_the_commands_own(tmp_path: Path) -> None:
    frame = ScriptFacts("torch", micro_batch=32, accumulation=4)
    words = "train.py -b {micro_batch=32} -a {gradient_accumulation=4} -t {threads=2}"
    knobs = (Knob("threads", (1, 2)),)
    job = script_job(words, tmp_path, frame, knobs, global_batch=128, devices=1)
    read = baseline_of(["threads=1"], job, CPU).configuration
    assert (read.data_parallel, read.micro_batch, read.get("threads")) == (1, 32, 1)
    problem = problem_of_job(job, CPU, baseline=["micro_batch=16"])
    assert problem.baseline is not None
    assert (problem.baseline.data_parallel, problem.baseline.micro_batch) == (1, 16)
    assert problem.baseline.get("threads") == 2


def test_nothing_to_turn_ends_after_the_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inspection alone is made up here; what it leads to is not."""
    job = script_job("train.py", tmp_path, ScriptFacts("torch", micro_batch=32, accumulation=4))
    job = replace(job, devices=1, global_batch=128)
    (tmp_path / "train.py").write_text(SOURCE)
    monkeypatch.setattr("tuner.study.request.job_of_script", lambda *_, **__: job)
    words = ["optimize", "--no-clocks", "--runs-dir", str(tmp_path / "runs")]
    assert main([*words, "--", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "nothing to try: of the script 'train' nothing can be turned here" in said
    assert f"What it uses as it is: tuner run -- {tmp_path / 'train.py'}" in said
    assert "--knob NAME=VALUE,VALUE with {NAME=VALUE} in the command" in said
    assert "micro_batch: no argument of the script was found that sets its batch size" in said


def test_a_script_is_no_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "train.py"]) == 2
    assert "train.py is a script: tuner optimize -- train.py" in capsys.readouterr().err


@pytest.mark.usefixtures("launchers_here")
def test_without_a_launcher_one_process_is_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE)
    for command, ranks in (
        ("train.py", 1),
        ("CUDA_LAUNCH_BLOCKING=1 python train.py", 1),
        ("torchrun --nproc-per-node 2 train.py", 2),
    ):
        assert blank_job(Script(command, cwd=tmp_path), CPU).devices == ranks
    # A probe across nodes has a rank on each device.
    on_two = replace(CPU, nodes=2)
    assert blank_job(Script("train.py", cwd=tmp_path), on_two, nodes=2).devices == 4


def test_an_answer_of_unknown_length_is_of_one_step(tmp_path: Path) -> None:
    from tests.support.results import small_result
    from tuner.answer.answer import choose_again
    from tuner.display.text import answer_lines

    result = small_result()
    job = script_job("train.py", tmp_path, ScriptFacts("torch"), steps=None, global_batch=0)
    points = tuple(replace(point, of_step=True) for point in result.points)
    front = tuple(replace(point, of_step=True) for point in result.front_points)
    spent = replace(result.spent, payback_share=None)
    unknown = replace(result, job=job, steps=1, points=points, front_points=front, spent=spent)
    told = "\n".join(answer_lines(unknown))
    assert "/step" in told
    assert "of the job" not in told
    assert "--deadline" not in told
    assert unknown.to_json()["steps"] is None
    with pytest.raises(InputError, match="--deadline limits the whole training"):
        choose_again(unknown, Constraints(deadline_s=60.0))
    assert "/step" not in "\n".join(answer_lines(result))
