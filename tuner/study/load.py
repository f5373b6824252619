"""Studies read from their run folders: the specification, and the result made of it.

People edit files, so what study.toml says is checked here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from tuner.planning.plan import plan_result
from tuner.planning.table import PLAN_FILE, read_plan
from tuner.problem.batch_scaling import in_job_steps
from tuner.problem.constraints import Constraints
from tuner.problem.from_run import problem_of_run
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.problem.stop_reason import (
    NoVerdict,
    NoVerdictKind,
    StopKind,
    StopReason,
    stop_sentence,
)
from tuner.problem.study_spec import SessionEnd, StudySpec, why_unverified
from tuner.results.build import build_result
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.options import read_options
from tuner.workload.probe import ProbeRecord, WindowPolicy

_WHERE = "study.toml"


def result_of(folder: RunFolder) -> Result:
    """Return the result of an existing run, from its folder alone."""
    if (folder.path / PLAN_FILE).exists():
        result = plan_result(load_spec(folder, ()), read_plan(folder.path))
    else:
        records = folder.records()
        result = study_result(load_spec(folder, records), records)
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
    return StudySpec(
        name=folder.name,
        run_dir=folder.path,
        problem=problem_of_run(folder, tuple(visited), study),
        constraints=constraints,
        settings=read_options(
            SearchSettings,
            {**settings, "window": read_options(WindowPolicy, window, _WHERE)},
            _WHERE,
        ),
        unverified=why_unverified(
            settings.get("verify") is True,
            study.get("recorded", {}),
            simulated=any(record.meter.is_simulated for record in records),
        ),
        created=str(study.get("created", "")),
        ended=read_end(study.get("ended", {})),
    )


def read_end(ended: Mapping[str, Any]) -> SessionEnd:
    """Parse how the last session ended."""
    stop = StopReason("running")
    if reason := _reason(ended.get("stop_reason"), get_args(StopKind)):
        stop = StopReason(**reason)
        _check_sentence(lambda: stop_sentence(stop))
    no_verdict = None
    found = ended.get("no_verdict")
    if isinstance(found, Mapping) and found.get("kind") in get_args(NoVerdictKind):
        no_verdict = NoVerdict(found["kind"], str(found.get("message", "")))
    time_s = ended.get("time_s")
    if time_s is not None and (type(time_s) not in (int, float) or not abs(time_s) < 2**63):
        raise InvalidValue(f"time_s in {_WHERE}", time_s, "a number")
    return SessionEnd(stop, time_s, no_verdict)


def _reason(section: Any, kinds: Sequence[str]) -> dict[str, Any] | None:
    if section is None:
        return None
    if not isinstance(section, Mapping) or section.get("kind") not in kinds:
        raise InvalidValue(f"a reason in {_WHERE}", str(section)[:80], "a table of a known kind")
    figures = section.get("figures", {})
    if not isinstance(figures, Mapping) or any(
        type(value) not in (int, float) for value in figures.values()
    ):
        raise InvalidValue(f"figures in {_WHERE}", str(figures)[:80], "a table of numbers")
    texts = {name: str(section[name]) for name in ("message", "run") if name in section}
    return {"kind": section["kind"], "figures": dict(figures), **texts}


def _check_sentence(make: Callable[[], str]) -> None:
    try:
        make()
    except KeyError as error:
        raise InputError(f"a reason in {_WHERE} lacks the figure {error}") from error


def study_result(spec: StudySpec, records: Sequence[ProbeRecord]) -> Result:
    """Return the result of a study, from everything that its probes measured."""
    records = [in_job_steps(record, spec.problem.job) for record in records]
    return build_result(spec, records)
