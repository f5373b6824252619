"""A standard knob that changes what is learnt: searched when allowed, and marked."""

from __future__ import annotations

from pathlib import Path

import pytest

import tuner
from tests.support.studies import problem_of_job
from tuner.display.view import View
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import Knob, changed_training, marked
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space, space_names

JOB, CLUSTER = load_job("qwen2.5-7b"), load_cluster("h200-8")
SPACE = """what = "matrix products in FP8"
[knobs]
data_parallel = "auto"
micro_batch = [1, 4]
zero_stage = [1, 3]
compilation = ["none", "regional"]
fp8 = ["none", "tensorwise", "rowwise", "mx"]
"""


@pytest.fixture
def in_fp8(tmp_path: Path) -> str:
    space = tmp_path / "fp8.toml"
    space.write_text(SPACE)
    return str(space)


def test_no_built_in_space_has_it() -> None:
    assert [name for name in space_names() if load_space(name).changing] == []
    assert KNOBS["fp8"].default == "none"


def test_a_standard_value_and_a_declared_one_carry_the_same_mark() -> None:
    knob = Knob("dropout", (0, 1), baseline=0, changes_training=True)
    launch = {"fp8": "rowwise", "dropout": 1}
    assert changed_training(launch, [knob]) == ("fp8=rowwise", "dropout=1")
    assert marked({"fp8": "none", "dropout": 0}, [knob]) == {"fp8": "none", "dropout": 0}
    assert marked(launch, [])["training"] == "changed"


def test_the_built_in_program_does_not_run_it_and_says_so(in_fp8: str) -> None:
    found = problem_of_job(JOB, CLUSTER, in_fp8, allow_changed_training=True)
    assert {c.get("fp8") for c in found.candidates} == {"none"}
    assert "fp8 tensorwise is not run by the built-in training program" in "\n".join(found.notes)
    with pytest.raises(tuner.InputError, match="fp8 rowwise takes a job in bf16"):
        problem_of_job(
            tuner.TrainingJob(**{**vars(JOB), "precision": "fp32"}),
            CLUSTER,
            in_fp8,
            baseline=Configuration.of(data_parallel=8, fp8="rowwise"),
        )


@pytest.mark.extra("tuner.planner.plan")
def test_a_plan_marks_its_points_on_every_page(tmp_path: Path, in_fp8: str) -> None:
    notes: list[str] = []
    plain = tuner.plan(
        JOB,
        cluster=CLUSTER,
        space=in_fp8,
        runs_dir=tmp_path,
        name="plain",
        report=False,
        on_progress=lambda event: notes.append(str(event)),
    )
    assert any("fp8: it changes what is learnt" in note for note in notes)
    assert {p.configuration.get("fp8") for p in plain.points} <= {"none"}
    assert View(plain).notices == ""
    result = tuner.plan(
        JOB,
        cluster=CLUSTER,
        space=in_fp8,
        allow_changed_training=True,
        runs_dir=tmp_path,
        name="changed",
    )
    changed = [p.configuration for p in result.points if p.configuration.get("fp8") != "none"]
    assert changed
    assert all(c.get("training") == "changed" for c in changed)
    assert "Points marked training=changed learn something else" in View(result).notices
    report = (result.run_dir / "report.html").read_text()
    assert "training=changed" in report
    again = tuner.load_result("changed", runs_dir=tmp_path)
    assert View(again).notices == View(result).notices
