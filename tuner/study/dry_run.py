"""Description of a search before anything is started: cost, commands, files and clocks."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from tuner.executors.choose import how_started
from tuner.formatting import duration, energy_text
from tuner.problem.constraints import Constraints
from tuner.problem.file_starts import of_files, of_knobs
from tuner.problem.forecast import SearchForecast, forecast
from tuner.problem.problem import Problem
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.knobs import KNOBS
from tuner.study.request import StudyRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_job import ScriptJob

#: What a run folder holds at the end (docs/develop/architecture.md, "Files of a study").
FILES = (
    "study.toml",
    "study.journal",
    "trace/probes.jsonl",
    "trace/power/",
    "probes/",
    "report.html",
    "best/",
)


@dataclass(frozen=True)
class DryRun:
    """What `tuner optimize` would do.

    Attributes:
        baseline: short name of what is measured first; "" for a script.
        clocks: what is set on the devices, a phrase each; empty if nothing is.
    """

    forecast: SearchForecast | None
    configurations: int
    launches: int
    baseline: str
    commands: tuple[str, ...]
    files: tuple[str, ...]
    clocks: tuple[str, ...]
    limits: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        cost = self.forecast.to_json() if self.forecast else None
        return {**vars(self), "forecast": cost}

    @property
    def _cost(self) -> str:
        if self.forecast is not None:
            return self.forecast.sentence
        if self.configurations:  # a job without a forecast: a search on predictions
            return "Nothing is measured: every probe is a prediction (all at once: tuner plan)."
        return "The cost is known once the script ran."

    def lines(self) -> list[str]:
        """Return the description for people."""
        lines = [self._cost]
        if self.configurations:
            lines.append(
                f"Search: {self.configurations:,} configurations, {self.launches:,} launch "
                f"settings; first today's, {self.baseline}"
            )
        lines.append(f"Limits: {'; '.join(self.limits) or 'none'}")
        lines += ["Starts:", *(f"  {line}" for line in self.commands)]
        folder = self.files[0].rpartition("/")[0]
        names = ", ".join(file.removeprefix(f"{folder}/") for file in self.files)
        lines += ["Writes:", f"  {folder}/: {names}"]
        lines += ["Sets:", *(f"  {line}" for line in self.clocks or ("no clock, no power limit",))]
        lines += [f"Note: {note}" for note in self.notes]
        return [*lines, "Nothing was started or written (--dry-run)."]


def describe(problem: Problem, request: StudyRequest, run: RunFolder) -> DryRun:
    """Return what a search of this problem, which has a job and a cluster, would do."""
    assert problem.cluster is not None
    settings, by = request.search, how_started(request.executor, request.ray_address)
    knobs = problem.job.knobs if problem.job else ()
    baseline, device = problem.baseline, problem.cluster.device.name
    lives = {live for lives in set(problem.candidates.lives) for live in lives}
    clocks = []
    for name in sorted({n for live in lives for n in live}, key=lambda n: [*KNOBS, n].index(n)):
        values = sorted({live[name] for live in lives if name in live}, key=str)
        numbers = [value for value in values if isinstance(value, int)]
        span = f"{min(numbers)} to {max(numbers)}" if numbers else "one value a stage"
        clocks.append(f"{name} of each {device}: {span} ({len(values)} values)")
    if problem.simulated:
        clocks = []
    if clocks:
        clocks.append(
            "what was set before is read first, and put back after each probe, on Ctrl-C, and by a "
            "guard process if this one is killed"
        )
    return DryRun(
        forecast=None if problem.simulated else forecast(problem, settings),
        configurations=len(problem.candidates),
        launches=len(problem.candidates.launches),
        baseline=baseline.short if baseline else "",
        commands=(by,) if problem.simulated else (by, _command(problem), *of_knobs(knobs)),
        files=tuple(f"{run.path}/{name}" for name in FILES),
        clocks=tuple(clocks),
        limits=limits_of(settings),
        notes=(*_limits_of_job(request.constraints), *problem.notes),
    )


def describe_script(script: Script, request: StudyRequest) -> DryRun:
    """Return what a search of a script would do before it is known which knobs it has."""
    name = request.name or new_name(script.name, request.runs_dir)
    run = RunFolder.named(request.runs_dir, name)
    left_out = script.launcher.notes if script.words and script.launcher else ()
    more = (*of_knobs(script.knobs), *of_files((), script.framework, None))
    started = f"once, to see which knobs can be turned on it: {script.shown}"
    return DryRun(
        forecast=None,
        configurations=0,
        launches=0,
        baseline="",
        commands=(
            started,
            how_started(request.executor, request.ray_address),
            f"each probe: {script.shown}",
            *more,
        ),
        files=tuple(f"{run.path}/{name}" for name in FILES),
        clocks=("clocks and power limits where they can be set; --no-clocks leaves them alone",),
        limits=limits_of(request.search),
        notes=(*left_out, *_limits_of_job(request.constraints)),
    )


def limits_of(settings: SearchSettings) -> tuple[str, ...]:
    """Return the limits of a search, a phrase each."""
    found = ["until what is left would not repay a probe"]
    if settings.max_probes is not None:
        found.append(f"at most {settings.max_probes} probes")
    if settings.probe_budget_kJ is not None:
        found.append(f"at most {energy_text(settings.probe_budget_kJ)}")
    if settings.search_s is not None:
        found.append(f"at most {duration(settings.search_s)}")
    if settings.search_share is not None:
        found.append(f"at most {100 * settings.search_share:g} % of the training's energy")
    return tuple(found)


def _limits_of_job(constraints: Constraints) -> list[str]:
    given = ", ".join(f"{name}={value}" for name, value in constraints.given.items())
    return [f"the choice is made under {given}"] if given else []


def _command(problem: Problem) -> str:
    from tuner.workload.node.runner import training_program

    ranks = problem.baseline.world_size if problem.baseline else 1
    if isinstance(problem.job, ScriptJob):
        return f"each probe: {ranks} ranks of {shlex.join(problem.job.words)}"
    program = shlex.quote(str(training_program()))
    return f"each probe: {ranks} ranks of python {program} (synthetic data, no checkpoints)"
