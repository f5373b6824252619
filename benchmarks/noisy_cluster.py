"""Small search problems with a known truth, and a runner that measures them with realistic noise.

The truth is made up (launches with a level of their own, each bending differently with the clock)
or taken from a recorded table. The runner adds what a cluster adds: an effect of each launch that
all its windows share, correlated steps within a window, a drift within the launch, and a second
visit of the first setting. A study sees the records only, never the truth.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.problem.problem import ProbeCost, Problem, space_section
from tuner.recordings.table import load_table
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.node.measure.statistics import standard_error
from tuner.workload.records.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest, Runner

METER = MeterInfo("drawn", "gpu", "a benchmark's draws")
COST = ProbeCost(launch_s=20.0, launch_power=0.5, settle_s=1.0, window_s=5.0, min_steps=3)
#: Clocks of the made-up problems, as shares of the highest.
CLOCKS = (0.5, 0.625, 0.75, 0.875, 1.0)
#: Steps and power blocks of a window.
STEPS, BLOCKS = 40, 10


@dataclass(frozen=True)
class Truth:
    """A search problem and the true figures of its configurations.

    Attributes:
        name: of the problem.
        figures: (step time in s, power in W) of each configuration; the first is the baseline.
    """

    name: str
    figures: Mapping[Configuration, tuple[float, float]]

    @property
    def baseline(self) -> Configuration:
        """The configuration that is run today."""
        return next(iter(self.figures))

    def problem(self) -> Problem:
        """Return the problem as a study sees it: the candidates, without their figures."""
        candidates = Candidates.from_configurations(self.figures)
        return Problem(
            name="noisy-cluster",
            candidates=candidates,
            steps=1,
            baseline=self.baseline,
            cost=COST,
            identity={
                "recorded": {"table": self.name, "steps": 1, "varies": True},
                "space": space_section("made up", candidates),
            },
        )


@dataclass(frozen=True)
class Noise:
    """Errors of the measurements, as standard deviations of logarithms.

    Attributes:
        launch: effect of a launch on time, and another on power, shared by all its windows.
        step: one step's time or one block's power about the window's level.
        correlation: lag-1 autocorrelation of the steps and of the blocks.
        window: level of one window about its launch's.
        drift: change of time and of power within a launch once it is warm, with a time constant of
            a minute; its sign differs from launch to launch.
    """

    launch: float
    step: float = 0.01
    correlation: float = 0.5
    window: float = 0.002
    drift: float = 0.005


def made_up_truth(seed: int) -> Truth:
    """Return 6 to 12 launches at five clocks each.

    A step takes a share of time that scales with 1 / clock, and power rises with a power of the
    clock; level, share and exponent of each launch differ, smoothly with its knob and at random.
    """
    rng = np.random.default_rng((seed, 1))
    count = int(rng.integers(6, 13))
    optimum, bend = rng.uniform(0, count), rng.uniform(0.02, 0.08)
    share, exponent, idle = rng.uniform(0.3, 0.9), rng.uniform(1.6, 2.8), rng.uniform(0.2, 0.45)
    launches = []
    for number in range(count):
        level = bend * abs(number - optimum) + rng.normal(0, 0.03)
        bound = float(np.clip(share + rng.normal(0, 0.1), 0.1, 1.0))
        power = 300.0 * math.exp(0.02 * number + rng.normal(0, 0.03))
        bends = exponent + rng.normal(0, 0.15)
        figures = {}
        for clock in CLOCKS:
            seconds = 0.25 * math.exp(level) * (1 - bound + bound / clock)
            watts = power * (idle + (1 - idle) * clock**bends)
            live = Settings(clock_MHz=round(1400 * clock))
            launch = Settings(micro_batch=number + 1)
            figures[Configuration(launch, live)] = (seconds, watts)
        launches.append(figures)
    first = int(rng.integers(count))
    ordered = [launches[first], *launches[:first], *launches[first + 1 :]]
    pairs = [pair for figures in ordered for pair in reversed(figures.items())]
    return Truth(f"made-up {seed}", dict(pairs))


def flat_truth(launches: int = 10) -> Truth:
    """Return launches that do not differ: any saving that is found in them is luck."""
    settings = [Settings(micro_batch=number + 1) for number in range(launches)]
    return Truth("flat", {Configuration(launch): (0.25, 300.0) for launch in settings})


def recorded_truths(folder: Path) -> Iterator[Truth]:
    """Yield the groups of a recorded table; its means are the truth, its first row the baseline."""
    table = load_table(folder)
    for group in table.groups:
        points = {point.configuration: (point.time_s, point.power_W) for point in group.points}
        yield Truth(f"{table.name}: {group.name}", points)


def correlated(rng: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return a stationary AR(1) series of unit variance, (count,)."""
    series = rng.standard_normal(count)
    for i in range(1, count):
        series[i] = correlation * series[i - 1] + math.sqrt(1 - correlation**2) * series[i]
    return series


def draws(*names: object) -> np.random.Generator:
    """Return random numbers that depend on these names alone."""
    text = "\n".join(map(str, names)).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))


class NoisyRunner(Runner):
    """Runner that measures a truth with noise.

    The draws of a probe depend only on the seed and the probe's name, so a launch that is extended
    keeps the windows that it has.

    Args:
        truth: true figures.
        noise: errors of the measurements.
        seed: of the draws.
    """

    def __init__(self, truth: Truth, noise: Noise, *, seed: int) -> None:
        self.meter = METER
        self._truth, self._noise, self._seed = truth, noise, seed

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Measure the settings in turn and, if there are several, the first one again."""
        rng = draws(self._seed, request.probe_id)
        launch = self._noise.launch * rng.standard_normal(2)
        drift = self._noise.drift * rng.standard_normal(2)
        configurations = request.configurations()
        visits = [*configurations, configurations[0]] if len(configurations) > 1 else configurations
        now_s = COST.launch_s
        power_W = self._truth.figures[visits[0]][1]
        energy_J = COST.launch_s * COST.launch_power * power_W
        windows = []
        for number, configuration in enumerate(visits):
            now_s += COST.settle_s
            name = "again" if number and number == len(configurations) else number
            effect = launch + drift * (0.5 - math.exp(-now_s / 60))
            own = draws(self._seed, request.probe_id, name)
            window = self._window(configuration, effect, own, now_s)
            windows.append(window)
            now_s += window.window_s
            energy_J += COST.settle_s * window.power_W + window.energy_J
        return ProbeRecord(
            request,
            tuple(windows),
            METER,
            launch_s=COST.launch_s,
            wall_s=now_s,
            energy_J=energy_J,
            host="noisy",
        )

    def _window(
        self,
        configuration: Configuration,
        effect: Sequence[float] | np.ndarray,
        rng: np.random.Generator,
        started_s: float,
    ) -> Measurement:
        seconds, watts = self._truth.figures[configuration]
        noise = self._noise
        level = np.exp(np.asarray(effect) + noise.window * rng.standard_normal(2))
        steps = 1 + noise.step * correlated(rng, STEPS, noise.correlation)
        blocks = 1 + noise.step * correlated(rng, BLOCKS, noise.correlation)
        times, powers = seconds * level[0] * steps, watts * level[1] * blocks
        window_s, power_W = float(times.sum()), float(powers.mean())
        return Measurement(
            live=configuration.live,
            steps=STEPS,
            window_s=window_s,
            step_time_s=window_s / STEPS,
            step_time_se_s=standard_error(times),
            energy_J=power_W * window_s,
            power_W=power_W,
            power_se_W=standard_error(powers),
            started_s=started_s,
        )

    def close(self) -> None:
        """Do nothing."""
