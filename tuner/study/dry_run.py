"""What a search will cost and start, said before anything runs: the dry run, and the forecast.

Time and energy of the forecast are those of launches like the baseline's, by the analytic models.
The number of launches is what the limits allow, what the training can repay, and what a search
usually makes until nothing is left to find, whichever is least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.executors.choose import how_started
from tuner.formatting import counted, duration, energy_text, label
from tuner.problem.from_job import cluster_of
from tuner.problem.problem import GpuLaunch, Problem
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import LEAST_LAUNCHES, SearchSettings
from tuner.search_spaces.knobs import KNOBS
from tuner.study.request import StudyRequest
from tuner.workload.records.probe import Basis
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.user_code import of_files, of_knobs

#: Launches of a search on a space of the shipped ones until nothing is left that repays a probe,
#: and pairs of launches that verify its choice (`python -m benchmarks.search`, own stop).
USUAL_LAUNCHES, USUAL_PAIRS = 12, 3
#: Live settings that a launch visits where there are any.
USUAL_VISITS = 2
#: Share of a training's energy that tuning may save: a search cannot repay more than that.
USUAL_SAVING = 0.2


@dataclass(frozen=True)
class SearchForecast:
    """Forecast of a search: its probes together, and the whole training with the baseline.

    Time and energies are None if no model knows the job, `job_kJ` also if its length is unknown.
    """

    probes: int
    time_s: float | None
    energy_kJ: float | None
    job_kJ: float | None
    devices: int
    device: str
    sets_clocks: bool

    @property
    def sentence(self) -> str:
        parts = [f"about {counted(self.probes, 'probe')}"]
        if self.time_s is not None:
            parts.append(duration(self.time_s))
        if self.energy_kJ is not None:
            parts.append(energy_text(self.energy_kJ) + label("estimated"))
        text = f"This search: {', '.join(parts)} on {self.devices} x {self.device}"
        text += "; clocks will be changed and put back" if self.sets_clocks else ""
        return f"{text}; Ctrl-C loses nothing."

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sentence": self.sentence}


def forecast(problem: Problem, settings: SearchSettings) -> SearchForecast:
    """Return the expected cost of a search on real devices."""
    cluster = problem.cluster
    assert cluster is not None
    live = any(configuration.live for configuration in problem.candidates)
    visits = USUAL_VISITS if live else 1
    launches = min(USUAL_LAUNCHES, len(problem.candidates.launches))
    each_s = each_kJ = job_kJ = None
    if problem.prior is not None:
        each_s, each_kJ, job_kJ = _launch(problem, settings, visits)
        for share, least in (
            (USUAL_SAVING, LEAST_LAUNCHES // 2),
            (settings.search_share, LEAST_LAUNCHES),  # of the launches of the search alone
        ):
            if job_kJ is not None and share is not None:
                launches = min(launches, max(least, math.floor(share * job_kJ / each_kJ)))
    probes = launches + (2 * USUAL_PAIRS if settings.verify else 0)
    limits = [float(probes), settings.max_probes or math.inf]
    if each_s is not None and each_kJ is not None:
        if settings.probe_budget_kJ is not None:
            limits.append(settings.probe_budget_kJ / each_kJ)
        if settings.search_s is not None:
            limits.append(settings.search_s / each_s)
    probes = max(1, math.floor(min(limits)))
    return SearchForecast(
        probes,
        None if each_s is None else probes * each_s,
        None if each_kJ is None else probes * each_kJ,
        job_kJ,
        problem.baseline.world_size,
        cluster.device.name,
        live,
    )


def _launch(
    problem: Problem, settings: SearchSettings, visits: int
) -> tuple[float, float, float | None]:
    """Return seconds and kilojoules of one probe, and kilojoules of the training (None if unknown).

    A launch on GPUs takes what `GpuLaunch` says, one on a CPU what `REAL_COST` says of the
    built-in program.
    """
    assert problem.prior is not None
    assert problem.cluster is not None
    figures = problem.prior.predict([problem.baseline])
    step_s, power_W = float(figures.step_time_s[0]), float(figures.power_W[0])
    cost = problem.cost
    launch_s, launch_power = cost.launch_s, cost.launch_power
    if problem.cluster.device.is_gpu:
        c = GpuLaunch()
        ranks = problem.baseline.world_size
        launch_s = c.launch_s + c.launch_each_s * math.log2(ranks) + c.warm_up_steps * step_s
        launch_s += float(figures.memory_bytes[0]) / c.load_Bps
        launch_power = c.launch_power
    window_s = max(cost.window_s, settings.window.min_steps * step_s)
    visit_s = cost.settle_s + window_s
    joules = power_W * (launch_s * launch_power + visits * visit_s)
    job_kJ = power_W * step_s * problem.length / 1000 if problem.length else None
    return launch_s + visits * visit_s, joules / 1000, job_kJ


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
