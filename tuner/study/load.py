"""Studies read from their run folders: specification and result.

People edit files, so what study.toml says is checked here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tuner.answer.answer import Answer
from tuner.answer.state import answer_of_study
from tuner.answer.views import view_named
from tuner.problem.constraints import Constraints
from tuner.problem.from_job import problem_of_job
from tuner.problem.problem import Problem, Recording
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import (
    NO_VERDICTS,
    STOP_KINDS,
    NoVerdict,
    SearchSettings,
    StopReason,
    stop_sentence,
)
from tuner.problem.study_spec import (
    SessionEnd,
    StudySpec,
    parse_baseline,
    parse_cluster,
    parse_job,
    parse_request,
    why_unverified,
)
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.fields import read_options
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Basis, ProbeRecord, WindowPolicy

_WHERE = "study.toml"
#: Largest number of candidates that are enumerated again: more takes seconds.
MOST_ENUMERATED = 20_000


def answer_of_run(folder: RunFolder) -> Answer:
    """Return the answer of an existing run, from its folder alone."""
    if "plan" in (folder.read_study() or {}):
        result = view_named("plan").answer_of(folder)
    else:
        records = folder.records()
        result = answer_of_study(load_spec(folder, records), records)
    return replace(result, report_path=folder.report) if folder.report.exists() else result


def load_spec(folder: RunFolder, records: Sequence[ProbeRecord]) -> StudySpec:
    """Parse study.toml; candidates that cannot be enumerated again are those of the records."""
    study = folder.read_study()
    if study is None:
        raise InputError(f"{folder.path} holds no study.toml, which says what the study is about")
    visited = dict.fromkeys(c for record in records for c in record.request.configurations())
    constraints = read_options(Constraints, study.get("constraints", {}), _WHERE, strict=True)
    settings = dict(study.get("settings", {}))
    window = settings.pop("window", {})
    if not isinstance(window, Mapping):
        raise InvalidValue(f"settings.window in {_WHERE}", window, "a table")
    predicts = any(record.meter.basis is Basis.PREDICTED for record in records)
    problem = _problem(folder, tuple(visited), study)
    return StudySpec(
        name=folder.name,
        run_dir=folder.path,
        problem=problem,
        constraints=constraints,
        settings=read_options(
            SearchSettings,
            {**settings, "window": read_options(WindowPolicy, window, _WHERE)},
            _WHERE,
        ),
        unverified=why_unverified(
            settings.get("verify") is True, replace(problem, predicts=predicts)
        ),
        created=str(study.get("created", "")),
        ended=read_end(study.get("ended", {})),
    )


def _problem(
    folder: RunFolder, visited: tuple[Configuration, ...], study: Mapping[str, Any]
) -> Problem:
    job, cluster = parse_job(study), parse_cluster(study)
    recording = Recording.of(study)
    if job is None and recording is None:
        raise InputError(f"{folder.study_file} names neither a job nor a recording")
    steps = recording.steps if recording else None
    job = job.lasting(steps) if job else None
    of_job = job.steps if job else None
    return Problem(
        name=job.name if job else recording.name if recording else folder.name,
        candidates=_candidates(study, visited),
        steps=steps or of_job or 1,
        baseline=parse_baseline(study),
        identity={
            name: study[name]
            for name in ("job", "cluster", "recorded", "space", "request", "baseline", "plan")
            if name in study
        },
        job=job,
        cluster=cluster,
        unit_of_work=recording.unit_of_work if recording else "optimizer step",
        recording=recording,
    )


def _candidates(study: Mapping[str, Any], visited: Sequence[Configuration]) -> Candidates:
    """Return the candidates that were searched if they can be enumerated again, else the visited.

    Those never visited are what a result predicts (`Result.predicted`).
    """
    count = study.get("space", {}).get("configurations", 0)
    if type(count) is int and 0 < count <= MOST_ENUMERATED:
        try:
            found = _searched(study)
        except (InputError, OSError, TypeError):  # a file has gone, or the study was edited
            found = None
        if found is not None and len(found.whole) == count:
            return found
    return Candidates.from_configurations(visited)


def _searched(study: Mapping[str, Any]) -> Candidates | None:
    recording, request = Recording.of(study), parse_request(study)
    if recording is not None and recording.table:
        tables: Any = shipped_module("tuner.recordings.problem")  # an extra
        if tables is None:
            return None
        found = tables.table_problem(Path(recording.path), recording.group or None, None)[0]
        return cast(Candidates, found.candidates)
    if request is None:
        return None
    return problem_of_job(request).candidates


def read_end(ended: Mapping[str, Any]) -> SessionEnd:
    """Parse how the last session ended."""
    stop, section = StopReason("running"), ended.get("stop_reason")
    if section is not None:
        stop = _stop_reason(section)
    no_verdict = None
    found = ended.get("no_verdict")
    if isinstance(found, Mapping) and found.get("kind") in NO_VERDICTS:
        texts = (str(found.get(name, "")) for name in ("message", "limit"))
        no_verdict = NoVerdict(found["kind"], *texts)
    time_s = ended.get("time_s")
    if time_s is not None and (type(time_s) not in (int, float) or not abs(time_s) < 2**63):
        raise InvalidValue(f"time_s in {_WHERE}", time_s, "a number")
    return SessionEnd(stop, time_s, no_verdict)


def _stop_reason(section: Any) -> StopReason:
    if not isinstance(section, Mapping) or section.get("kind") not in STOP_KINDS:
        raise InvalidValue(f"a reason in {_WHERE}", str(section)[:80], "a table of a known kind")
    figures = section.get("figures", {})
    if not isinstance(figures, Mapping) or any(
        type(value) not in (int, float) for value in figures.values()
    ):
        raise InvalidValue(f"figures in {_WHERE}", str(figures)[:80], "a table of numbers")
    reason = StopReason(section["kind"], dict(figures), str(section.get("message", "")))
    try:
        stop_sentence(reason)
    except KeyError as error:
        raise InputError(f"a reason in {_WHERE} lacks the figure {error}") from error
    return reason
