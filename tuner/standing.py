"""The answer of a run: from what was asked, the trace, and how the last session ended.

`tuner.driver` answers so when a session is over. From the folder alone `tuner.api.load_result`
hands the same answer to users, and the dashboard shows it of runs that another release made. What
study.toml says is checked here, because people edit files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InputError, InvalidValue
from tuner.decide import Constraints
from tuner.result import Result
from tuner.runs import RunFolder

if TYPE_CHECKING:
    from tuner.problem import Problem
    from workload.probe import ProbeRecord

__all__ = ["answer", "chosen_before", "known_constraints", "result_of"]


def result_of(folder: RunFolder) -> Result:
    """The answer of a run that stands, from its folder alone.

    Raises:
        InputError: its files cannot be read.
    """
    from tuner.problem import problem_of_run
    from workload.trace import read_trace

    known = folder.read_asked()
    assert known is not None
    records = read_trace(folder.trace).records if folder.trace.exists() else ()
    asked = [c for record in records for c in record.request.configurations()]
    problem = problem_of_run(folder, tuple(dict.fromkeys(asked)), known)
    result = answer(folder, problem, records, known)
    return replace(result, report_path=folder.report) if folder.report.exists() else result


def answer(
    folder: RunFolder, problem: Problem, records: Sequence[ProbeRecord], known: Mapping[str, Any]
) -> Result:
    """The answer of a problem, from everything that its probes measured.

    Args:
        folder: the run's.
        problem: what was searched.
        records: the trace.
        known: what study.toml holds: the constraints, the settings, and how the search ended.

    Raises:
        InputError: study.toml holds what it cannot.
    """
    from tuner.answer import build_result
    from tuner.job_steps import in_job_steps

    constraints = known_constraints(known)
    ended, settings = known.get("ended", {}), known.get("settings", {})
    seed = settings.get("seed", 0)
    if type(seed) is not int or seed < 0:
        raise InvalidValue("seed in study.toml", seed, "an integer of at least 0")
    records = [in_job_steps(record, problem.job) for record in records]
    result = build_result(
        problem,
        records,
        constraints,
        name=folder.name,
        run_dir=folder.path,
        stopped=str(ended.get("stopped", "The search has not ended.")),
        time_s=_figure(ended, "time_s", sum(record.wall_s for record in records)),
        limits=_limits_of(settings),
        seed=seed,
        unverified=_why_unverified(known),
        unfinished=str(ended.get("unfinished", "")),
        prefer=chosen_before(ended.get("chosen", {}), constraints),
    )
    if problem.target_gpus is None:
        return result
    from tuner.target import predict_target

    return replace(result, target=predict_target(problem, records, constraints, seed=seed))


def known_constraints(known: Mapping[str, Any]) -> Constraints:
    """What study.toml says was asked of the training job.

    Raises:
        InputError: its section holds something else.
    """
    try:
        return Constraints(**known.get("constraints", {}))
    except TypeError as error:
        raise InputError(f"the [constraints] of study.toml are none: {error}") from error


def _figure(section: Mapping[str, Any], name: str, otherwise: float) -> float:
    """A number of study.toml."""
    value = section.get(name, otherwise)
    if type(value) not in (int, float) or not abs(value) < 2**63:
        raise InvalidValue(f"{name} in study.toml", value, "a number")
    return float(value)


def chosen_before(chosen: Mapping[str, Any], constraints: Constraints) -> str:
    """Key of what the same question was settled on in an earlier session; "" for another one."""
    same = dict(chosen.get("constraints", {})) == constraints.stated
    return str(chosen.get("key", "")) if same else ""


def _limits_of(settings: Mapping[str, Any]) -> dict[str, float]:
    names = ("probe_budget_kJ", "max_probes", "search_s")
    limits = {name: settings[name] for name in names if settings.get(name) is not None}
    for name in limits:
        _figure(limits, name, 0.0)  # refuses what is none
    return limits


def _why_unverified(known: Mapping[str, Any]) -> str:
    """Why a study does not hold its choice against the baseline again; "" where it does.

    Args:
        known: what study.toml holds.
    """
    verify, recorded = known.get("settings", {}).get("verify"), known.get("recorded", {})
    if verify:
        return ""
    if "trace" in recorded:
        return "a recorded trace holds what was measured then, and nothing can be measured again"
    if "table" in recorded and not recorded.get("varies", True):
        return "the recorded table tells no spread, so measuring again would say the same"
    if verify is None:
        return "no launch was made to measure it again"
    return "it was asked not to be (--no-verify)"
