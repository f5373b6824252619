"""What a search will cost, said before anything runs.

Time and energy of the forecast are those of launches like the baseline's and those on the predicted
front, by the analytic models: fewer devices take longer, and a search visits them.
The number of launches is what the limits allow, what the training can repay, and what a search
usually makes until nothing is left to find, whichever is least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.formatting import counted, duration, energy_text, label
from tuner.pareto import nondominated
from tuner.problem.problem import Problem
from tuner.problem.settings import LEAST_LAUNCHES, SearchSettings
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import KNOBS

#: Launches of a search on a space of the shipped ones until nothing is left that repays a probe,
#: and pairs of launches that verify its choice (`python -m benchmarks.search`, own stop).
USUAL_LAUNCHES, USUAL_PAIRS = 12, 3
#: Live settings that a launch visits where there are any (`python -m benchmarks.search`: 3.0 on
#: tables of two GPUs, 2 to 3 on simulated clusters).
USUAL_VISITS = 3
#: Share of a training's energy that tuning may save: a search cannot repay more than that.
USUAL_SAVING = 0.2
#: Candidates that are predicted for a forecast, at most: it is to be said at once.
MOST_PREDICTED = 1000


@dataclass(frozen=True, kw_only=True)
class GpuLaunch:
    """Expected time and power of a launch on GPUs before its first measured step.

    Attributes:
        launch_s: of one rank, and `launch_each_s` more for each doubling of the ranks, seconds.
        load_Bps: bytes per second at which a rank initializes its states: drawn and cast on the
            device, and broadcast to the ranks that share them by DeepSpeed, at the speed of a
            network link of 400 Gbit/s.
        launch_power: power as a share of the configuration's own.
    """

    launch_s: float = 20.0
    launch_each_s: float = 3.0
    load_Bps: float = 50e9
    launch_power: float = 0.35
    warm_up_steps: int = 3


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
    live = {name for configuration in problem.candidates for name in configuration.live}
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
        any(name in KNOBS for name in live),  # others are the program's own
    )


def _launch(
    problem: Problem, settings: SearchSettings, visits: int
) -> tuple[float, float, float | None]:
    """Return seconds and kilojoules of one probe, and kilojoules of the training (None if unknown).

    A launch on GPUs takes what `GpuLaunch` says, one on a CPU what `REAL_COST` says of the
    built-in program.
    """
    assert problem.prior is not None
    visited = _likely(problem)
    figures = problem.prior.predict(visited)
    every = zip(visited, figures.step_time_s, figures.power_W, figures.memory_bytes, strict=True)
    costs = [
        _one(problem, settings, visits, configuration.world_size, *map(float, predicted))
        for configuration, *predicted in every
    ]
    today_J = float(figures.power_W[0] * figures.step_time_s[0])
    job_kJ = today_J * problem.length / 1000 if problem.length else None
    each_s, each_kJ = np.mean(costs, axis=0)
    return float(each_s), float(each_kJ), job_kJ


def _likely(problem: Problem) -> list[Configuration]:
    """Return configurations such as a search visits: the baseline, and of the other launches on the
    predicted front one each."""
    assert problem.prior is not None
    every = problem.candidates.configurations
    some = [problem.baseline, *every[:: math.ceil(len(every) / MOST_PREDICTED)]]
    figures = problem.prior.predict(some)
    best = nondominated(figures.power_W * figures.step_time_s, figures.step_time_s)
    front = {some[i].launch: some[i] for i in np.flatnonzero(best)}
    others = [each for launch, each in front.items() if launch != problem.baseline.launch]
    return [problem.baseline, *others]


def _one(
    problem: Problem,
    settings: SearchSettings,
    visits: int,
    ranks: int,
    step_s: float,
    power_W: float,
    memory_bytes: float,
) -> tuple[float, float]:
    """Return seconds and kilojoules of a probe with these figures."""
    assert problem.cluster is not None
    cost = problem.cost
    launch_s, launch_power = cost.launch_s, cost.launch_power
    if problem.cluster.device.is_gpu:
        c = GpuLaunch()
        launch_s = c.launch_s + c.launch_each_s * math.log2(ranks) + c.warm_up_steps * step_s
        launch_s += memory_bytes / c.load_Bps
        launch_power = c.launch_power
    window_s = max(cost.window_s, settings.window.min_steps * step_s)
    visit_s = cost.settle_s + window_s
    joules = power_W * (launch_s * launch_power + visits * visit_s)
    return launch_s + visits * visit_s, joules / 1000
