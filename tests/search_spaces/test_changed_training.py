"""A standard knob that changes what is learnt: searched when allowed, and marked."""

from __future__ import annotations

from pathlib import Path

import pytest

import tuner
from tuner.display.program_note import program_note
from tuner.problem.from_job import problem_of_job
from tuner.search_spaces.changed_training import changed_training, marked
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import Knob
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space, space_names

JOB, CLUSTER = load_job("qwen2.5-7b"), load_cluster("h200-8")


def test_only_the_space_of_its_own_has_it() -> None:
    assert [name for name in space_names() if load_space(name).changing] == ["fp8"]
    assert KNOBS["fp8"].default == "none"


def test_a_standard_value_and_a_declared_one_carry_the_same_mark() -> None:
    knob = Knob("dropout", (0, 1), baseline=0, changes_training=True)
    launch = {"fp8": "rowwise", "dropout": 1}
    assert changed_training(launch, [knob]) == ("fp8=rowwise", "dropout=1")
    assert marked({"fp8": "none", "dropout": 0}, [knob]) == {"fp8": "none", "dropout": 0}
    assert marked(launch, [])["training"] == "changed"


def test_it_is_searched_when_allowed_and_a_sentence_says_so_otherwise() -> None:
    found = {
        allowed: problem_of_job(JOB, CLUSTER, "fp8", allow_changed_training=allowed)
        for allowed in (False, True)
    }
    assert {c.get("fp8") for c in found[False].candidates} == {"none"}
    notes = "\n".join(found[False].notes)
    assert "fp8: it changes what is learnt (--allow-changed-training searches it)" in notes
    values = {(c.get("fp8"), c.get("training")) for c in found[True].candidates}
    assert values == {("none", None), ("tensorwise", "changed"), ("rowwise", "changed")}
    assert found[False].identity["space"]["digest"] != found[True].identity["space"]["digest"]
    with pytest.raises(tuner.InputError, match="fp8 rowwise takes a job in bf16"):
        problem_of_job(
            tuner.TrainingJob(**{**vars(JOB), "precision": "fp32"}),
            CLUSTER,
            "fp8",
            baseline=Configuration.of(data_parallel=8, fp8="rowwise"),
        )


def test_a_plan_marks_its_points_on_every_page(tmp_path: Path) -> None:
    notes: list[str] = []
    plain = tuner.plan(
        JOB,
        cluster=CLUSTER,
        space="fp8",
        runs_dir=tmp_path,
        name="plain",
        report=False,
        on_progress=lambda event: notes.append(str(event)),
    )
    assert any("fp8: it changes what is learnt" in note for note in notes)
    assert {p.configuration.get("fp8") for p in plain.points} <= {"none"}
    assert program_note(plain) == ""
    result = tuner.plan(
        JOB,
        cluster=CLUSTER,
        space="fp8",
        allow_changed_training=True,
        runs_dir=tmp_path,
        name="changed",
    )
    changed = [p.configuration for p in result.points if p.configuration.get("fp8") != "none"]
    assert changed
    assert all(c.get("training") == "changed" for c in changed)
    assert "Points marked training=changed learn something else" in program_note(result)
    report = (result.run_dir / "report.html").read_text()
    assert "training=changed" in report
    again = tuner.load_result("changed", runs_dir=tmp_path)
    assert program_note(again) == program_note(result)
