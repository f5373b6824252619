"""`tuner optimize --dry-run`: what a search would take, start, write and set if it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.api import metered
from tuner.executors.choose import how_started
from tuner.formatting import counted, duration, energy_text
from tuner.problem.job_request import cluster_of
from tuner.problem.problem import Problem
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.knobs import KNOBS
from tuner.study.events import Notify
from tuner.study.forecast import SearchForecast, forecast
from tuner.study.request import StudyRequest
from tuner.workload.records.probe import Basis
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.user_code import of_files, of_knobs


@dataclass(frozen=True)
class DryRun:
    """Preview of `tuner optimize`: its cost as a sentence, and phrases by heading."""

    cost: str
    forecast: SearchForecast | None
    phrases: Mapping[str, Sequence[str]]

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return {"forecast": self.forecast.to_json() if self.forecast else None, **self.phrases}

    def lines(self) -> list[str]:
        """Return the description for people."""
        lines = [self.cost]
        for heading, phrases in self.phrases.items():
            word = f"{heading.capitalize()}:"
            if heading in ("starts", "sets"):
                lines += [word, *(f"  {phrase}" for phrase in phrases)]
            else:
                lines += [f"{word} {phrase}" for phrase in phrases]
        return [*lines, "Nothing was started or written (--dry-run)."]


def dry_run(request: StudyRequest, on_progress: Notify | None = None) -> DryRun:
    """Preview `optimize`: nothing is started or written."""
    with metered(request):
        request = request.resolved(on_progress, starts=False)
        if request.script is not None:
            return describe_script(request.script, request)
        problem, run, request = request.inspected_problem(on_progress)
        return describe(problem, request, run)


def describe(problem: Problem, request: StudyRequest, run: RunFolder) -> DryRun:
    """Preview the search of a problem that has a job and a cluster."""
    candidates = problem.candidates
    knobs = problem.job.knobs if problem.job else ()
    search = (
        f"{len(candidates):,} configurations, {len(candidates.launches):,} launch settings; "
        f"first today's, {problem.baseline.short}"
    )
    # A job without a forecast: a search on predictions.
    cost = "Nothing is measured: every probe is a prediction (all at once: tuner plan)."
    expected, starts, clocks = None, list[str](), list[str]()
    if problem.basis is not Basis.PREDICTED:
        expected = forecast(problem, request.search)
        cost, starts = expected.sentence, [_command(problem), *map(str, of_knobs(knobs))]
        clocks = _clocks(problem)
    phrases = {
        "search": [search],
        **_of_request(request, run, starts),
        "sets": clocks or ["no clock, no power limit"],
        "note": [*_limits_of_job(request), *problem.notes],
    }
    return DryRun(cost, expected, phrases)


def describe_script(script: Script, request: StudyRequest) -> DryRun:
    """Preview the search of a script before its knobs are known."""
    run = RunFolder.named(request.runs_dir, request.name or new_name(script.name, request.runs_dir))
    script.require_startable()
    read = script.read_launcher
    left_out = read.notes if read is not None else ()
    lines = script.job_script.lines() if script.job_script is not None else []
    starts = [
        *(f"line {number}: {line}" for number, line in enumerate(lines, 1) if line.strip()),
        f"once, to see which knobs can be turned on it, and for each probe: {script.shown}",
        *map(str, of_knobs(script.knobs)),
        *map(str, of_files((), script.framework, None)),
    ]
    phrases = {
        **_of_request(request, run, starts),
        "sets": ["clocks and power limits where they can be set; --no-clocks leaves them alone"],
        "note": [*left_out, *_limits_of_job(request)],
    }
    return DryRun("The cost is known once the script ran.", None, phrases)


def _of_request(
    request: StudyRequest, run: RunFolder, starts: Sequence[str]
) -> dict[str, list[str]]:
    return {
        "limits": ["; ".join(_limits(request.search))],
        "starts": [
            how_started(request.executor, cluster_of(request.cluster), request.ray_address),
            *starts,
        ],
        "writes": [f"{run.path}/"],
    }


def _clocks(problem: Problem) -> list[str]:
    assert problem.cluster is not None
    lives = {live for lives in set(problem.candidates.lives) for live in lives}
    clocks = []
    for name in sorted({n for live in lives for n in live}, key=lambda n: [*KNOBS, n].index(n)):
        values = sorted({live[name] for live in lives if name in live}, key=str)
        numbers = [value for value in values if isinstance(value, int)]
        span = f"{min(numbers)} to {max(numbers)}" if numbers else "one value a stage"
        device = problem.cluster.device.name
        clocks.append(f"{name} of each {device}: {span} ({len(values)} values)")
    if clocks:
        clocks.append(
            "what was set before is read first, and put back after each probe, on Ctrl-C, and by a "
            "guard process if this one is killed"
        )
    return clocks


def _limits(settings: SearchSettings) -> list[str]:
    found = ["until what is left would not repay a probe"]
    if settings.max_probes is not None:
        found.append(f"at most {counted(settings.max_probes, 'probe')}")
    if settings.probe_budget_kJ is not None:
        found.append(f"at most {energy_text(settings.probe_budget_kJ)}")
    if settings.search_s is not None:
        found.append(f"at most {duration(settings.search_s)}")
    if settings.search_share is not None:
        found.append(f"at most {100 * settings.search_share:g} % of the training's energy")
    return found


def _limits_of_job(request: StudyRequest) -> list[str]:
    given = ", ".join(f"{name}={value}" for name, value in request.constraints.given.items())
    return [f"the choice is made under {given}"] if given else []


def _command(problem: Problem) -> str:
    assert problem.job is not None
    ranks = problem.baseline.world_size
    return f"each probe: {ranks} ranks of {launchable(problem.job, problem.cluster).shown}"
