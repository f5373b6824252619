"""study.toml is parsed into a specification once, whichever release wrote it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.problem.constraints import Constraints
from tuner.problem.from_recording import recorded_problem
from tuner.problem.run_folder import RunFolder, write_toml
from tuner.problem.settings import SearchSettings
from tuner.problem.stop_reason import NoVerdict, StopReason, stop_sentence
from tuner.problem.study_spec import SessionEnd, StudySpec, why_unverified
from tuner.search_spaces.errors import InputError
from tuner.study.load import load_spec
from tuner.testing.studies import write_table
from tuner.workload.probe import WindowPolicy


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


def test_what_is_written_is_read_back(spec: StudySpec):
    found = load_spec(written(spec), ())
    assert replace(found, problem=spec.problem) == spec
    assert found.problem.identity == spec.problem.identity
    assert found.problem.steps == spec.problem.steps


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
    assert "\n" not in str(refused.value)


def test_a_verdict_of_another_version_is_left_to_the_launches(spec: StudySpec):
    folder = written(spec, ended={"no_verdict": {"kind": "few_probes", "figures": {"pairs": 2}}})
    assert load_spec(folder, ()).ended.no_verdict is None


def test_why_a_choice_is_not_verified():
    assert why_unverified(True, {}) is None
    assert why_unverified(False, {}) == NoVerdict("not_requested")
    assert why_unverified(False, {"trace": "x"}) == NoVerdict("recorded_trace")
    assert why_unverified(False, {"table": "x", "varies": False}) == NoVerdict("no_spread")


def test_the_file_is_toml(spec: StudySpec):
    assert tomllib.loads(write_toml(spec.to_toml()))["ended"]["stop_reason"]["kind"]
