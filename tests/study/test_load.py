"""study.toml is parsed into a specification once, whichever release wrote it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.studies import problem_of_job, write_table
from tuner.problem import from_job
from tuner.problem.constraints import Constraints
from tuner.problem.problem import Recording
from tuner.problem.run_folder import RunFolder, write_toml
from tuner.problem.settings import NoVerdict, SearchSettings, StopReason, stop_sentence
from tuner.problem.study_spec import SessionEnd, StudySpec, why_unverified
from tuner.recordings.problem import recorded_problem
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import Knob
from tuner.study.load import load_spec
from tuner.workload.records.probe import WindowPolicy


@pytest.fixture
def spec(tmp_path: Path) -> StudySpec:
    problem, _ = recorded_problem(write_table(tmp_path / "table"))
    return StudySpec(
        name="one",
        run_dir=tmp_path / "runs" / "one",
        problem=problem,
        constraints=Constraints(budget_kJ=5.0, objective="time"),
        settings=SearchSettings(max_probes=8, seed=3, window=WindowPolicy(min_s=2.0)),
        created="2026-01-02T03:04:05",
        ended=SessionEnd(
            StopReason(
                "probe_budget", {"needed_kJ": 2, "left_kJ": 1, "probe_budget_kJ": 9, "estimated": 1}
            ),
            12.5,
            NoVerdict("spoiled", "no GPU"),
        ),
    )


def written(spec: StudySpec, **changes: object) -> RunFolder:
    assert spec.run_dir is not None
    folder = RunFolder(spec.run_dir)
    folder.write_study({**spec.to_toml(), **changes})
    return folder


def test_the_limit_that_left_no_room_for_a_verification_is_read_back(spec: StudySpec):
    limited = NoVerdict("limits_reached", limit="time")
    spec = replace(spec, ended=replace(spec.ended, no_verdict=limited))
    assert load_spec(written(spec), ()).ended.no_verdict == limited


def test_what_is_written_is_read_back(spec: StudySpec):
    found = load_spec(written(spec), ())
    assert replace(found, problem=spec.problem) == spec
    assert found.problem.identity == spec.problem.identity
    assert found.problem.steps == spec.problem.steps


def test_a_study_that_is_read_has_the_baseline_of_its_file(spec: StudySpec, tmp_path: Path) -> None:
    assert load_spec(written(spec), ()).problem.baseline == spec.problem.baseline
    for given in ("dp2 mb2 zero1", "dp1 mb4"):
        problem = problem_of_job("tiny-gpt", "cpu-2", baseline=given)
        own = StudySpec(name="own", run_dir=tmp_path / "own", problem=problem)
        assert load_spec(written(own), ()).problem.baseline == problem.baseline


@pytest.mark.parametrize("section", [{}, None], ids=["empty", "older"])
def test_a_study_without_a_baseline_is_read_with_every_default(
    spec: StudySpec, section: dict[str, Any] | None
) -> None:
    folder = written(spec, baseline=section or {})
    if section is None:
        study = {k: v for k, v in spec.to_toml().items() if k != "baseline"}
        folder.write_study(study)
    found = load_spec(folder, ()).problem.baseline
    assert (dict(found.launch), dict(found.live), found.world_size) == ({}, {}, 1)


@pytest.mark.parametrize("section", ["dp2", 3, {"launch": "dp2"}, {"live": [1]}, {"launch": 7}])
def test_a_damaged_baseline_is_one_sentence(spec: StudySpec, section: Any) -> None:
    with pytest.raises(InputError, match="baseline"):
        load_spec(written(spec, baseline=section), ())


def test_the_sentences_are_in_the_file_for_people(spec: StudySpec):
    folder = written(spec)
    ended = tomllib.loads(folder.study_file.read_text())["ended"]
    assert ended["stopped"] == stop_sentence(spec.ended.stop)


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("constraints", {"budget_kJ": -1}, "budget_kJ in study.toml is -1"),
        ("constraints", {"budget": 1}, "unknown name in study.toml 'budget'"),
        ("constraints", {"objective": "best"}, "unknown objective"),
        ("settings", {"seed": -1}, "seed in study.toml is -1"),
        ("settings", {"max_probes": 1.5}, "max_probes in study.toml is 1.5"),
        ("settings", {"max_probes": 10**400}, "max_probes in study.toml"),
        ("settings", {"window": 3}, "settings.window in study.toml is 3"),
        ("settings", {"window": {"min_s": "long"}}, "min_s in study.toml is 'long'"),
        ("ended", {"time_s": "long"}, "time_s in study.toml is 'long'"),
        ("ended", {"stop_reason": {"kind": "bored"}}, "a table of a known kind"),
        ("ended", {"stop_reason": {"kind": "time"}}, "lacks the figure 'search_s'"),
        ("ended", {"stop_reason": {"kind": "time", "figures": {"search_s": "x"}}}, "numbers"),
    ],
)
def test_an_edited_file_is_refused_in_a_sentence(spec: StudySpec, section, value, told):
    folder = written(spec, **{section: value})
    with pytest.raises(InputError) as refused:
        load_spec(folder, ())
    assert told in str(refused.value)


def test_a_verdict_of_another_version_is_left_to_the_launches(spec: StudySpec):
    folder = written(spec, ended={"no_verdict": {"kind": "few_probes", "figures": {"pairs": 2}}})
    assert load_spec(folder, ()).ended.no_verdict is None


def test_why_a_choice_is_not_verified(spec: StudySpec):
    problem = replace(spec.problem, recording=None)
    trace, table = Recording("t/probes.jsonl"), Recording("t", "t")
    assert why_unverified(True, problem) is None
    assert why_unverified(False, problem) == NoVerdict("not_requested")
    for recording, kind in (
        (trace, "recorded_trace"),
        (table, "no_spread"),
        (replace(table, varies=True), "not_requested"),
    ):
        assert why_unverified(False, replace(problem, recording=recording)) == NoVerdict(kind)
    predicting = replace(problem, predicts=True)
    assert why_unverified(True, predicting) == NoVerdict("prediction")


SPACE = """
[knobs]
data_parallel = "auto"
micro_batch = { max = 4 }
zero_stage = [0, 1]
optimizer_offload = ["none", "cpu"]
"""


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"baseline": "dp2 mb2 zero1"},
        {"allow_changed_training": True},
        {"max_gpus": 1},
        {"predicted": True},
    ],
)
def test_the_candidates_are_those_of_the_request(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Also where the file of the space has gone since."""
    space = tmp_path / "space.toml"
    space.write_text(SPACE)
    knobs = [Knob("dropout", (0, 1), baseline=0, how="env:DROPOUT", changes_training=True)]
    job = replace(load_job("tiny-gpt"), knobs=() if "max_gpus" in asked else tuple(knobs))
    problem = problem_of_job(job, "cpu-2", str(space), **asked)
    spec = StudySpec(name="one", run_dir=tmp_path / "runs" / "one", problem=problem)
    folder = written(spec, constraints={"max_gpus": asked.get("max_gpus")})
    space.unlink()
    found = load_spec(folder, ()).problem
    assert found.candidates.configurations == problem.candidates.configurations
    assert found.identity == problem.identity


def test_what_this_machine_cannot_build_is_not_a_candidate_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    monkeypatch.setattr(
        "tuner.workload.node.platforms.detect_cluster", lambda: load_cluster("cpu-2")
    )
    monkeypatch.setattr(from_job, "cannot_build", lambda op, gpus=False: f"no {op}")
    problem = problem_of_job("tiny-gpt", "auto", str(tmp_path / "space.toml"))
    folder = written(StudySpec(name="one", run_dir=tmp_path / "runs" / "one", problem=problem))
    monkeypatch.undo()
    found = load_spec(folder, ()).problem.candidates
    assert found.configurations == problem.candidates.configurations
    assert {c.get("optimizer_offload") for c in found} == {"none"}


def test_candidates_that_another_version_enumerates_otherwise_are_left_to_the_records(
    tmp_path: Path,
) -> None:
    problem = problem_of_job("tiny-gpt", "cpu-2")
    spec = StudySpec(name="one", run_dir=tmp_path / "runs" / "one", problem=problem)
    space = {**problem.identity["space"], "configurations": len(problem.candidates) + 1}
    assert len(load_spec(written(spec, space=space), ()).problem.candidates) == 0


def test_the_file_is_toml(spec: StudySpec):
    assert tomllib.loads(write_toml(spec.to_toml()))["ended"]["stop_reason"]["kind"]
