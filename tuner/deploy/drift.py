"""Drift of a training job: step time and power, compared with a measured point.

Each block of whole steps is compared with the interval of the point that the job was started from,
by the test that also notices changes of a training that is tuned (`tuner.online.windows`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.formatting import energy_text, label, number
from tuner.online.windows import ChangeDetector, Quantity
from tuner.results.parts import Point
from tuner.workload.probe import MeterInfo

#: Least number of blocks of a drift.
LEAST_BLOCKS = 5
#: Relative distance from the expected interval up to which a block is as expected: windows are
#: measured to 1 %.
TOLERANCE = 0.01
#: Number of blocks whose median difference from the one before tells their noise.
MEMORY = 40


@dataclass(frozen=True)
class Expectation:
    """Step time and power of a measured point with 90 % intervals, expected of its training."""

    key: str
    step_time_s: float
    power_W: float
    step_time_interval_s: tuple[float, float]
    power_interval_W: tuple[float, float]
    steps: int
    meter: MeterInfo

    @classmethod
    def of(cls, point: Point, steps: int) -> Expectation:
        """Return the expectation of a point for a job of this number of optimizer steps."""
        low, high = point.time_interval_s
        return cls(
            point.configuration.key,
            point.time_to_solution_s / steps,
            point.power_W,
            (low / steps, high / steps),
            point.power_interval_W or (point.power_W, point.power_W),
            steps,
            point.meter,
        )


@dataclass(frozen=True)
class Drift:
    """Drift of "step time" or "power" as a share of the expected value."""

    quantity: Quantity
    step: int
    relative: float
    sentence: str


@dataclass(frozen=True)
class RunSummary:
    """Comparison of a job's steps with the expectation.

    Attributes:
        seconds, joules: their total time and energy, by the same meter.
        observed: step_time_s, power_W and energy_per_step_J; empty before the first block.
        relative: each as a share of the expected value, minus 1.
    """

    expectation: Expectation
    steps: int
    seconds: float
    joules: float
    observed: Mapping[str, float] = field(default_factory=dict)
    relative: Mapping[str, float] = field(default_factory=dict)
    drifts: tuple[Drift, ...] = ()
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        others = {name: value for name, value in vars(self).items() if name != "expectation"}
        return {
            "promise": {**vars(self.expectation), "meter": dict(vars(self.expectation.meter))},
            **others,
            "observed": dict(self.observed),
            "relative": dict(self.relative),
            "drifts": [dict(vars(drift)) for drift in self.drifts],
        }


class _Blocks:
    # Blocks of one quantity, as logarithms of their ratios to the expected value.

    def __init__(self, quantity: Quantity, expected: float, interval: tuple[float, float]) -> None:
        self.quantity, self._expected = quantity, expected
        self._low, self._high = (math.log(end / expected) for end in interval)
        self._detector = ChangeDetector(quantity)
        self._logs: list[float] = []
        self._reported = 0.0

    def add(self, value: float) -> float | None:
        # Returns the relative size of a drift that was not reported yet, 0.2 for 20 % more.
        log = math.log(value / self._expected)
        beyond = max(log - self._high - TOLERANCE, 0.0) + min(log - self._low + TOLERANCE, 0.0)
        number = len(self._logs)
        self._logs.append(log)
        steps = itertools.pairwise(self._logs[-MEMORY:])
        noise = statistics.median(abs(later - one) for one, later in steps) if number else 0.0
        change = self._detector.add(number, beyond, math.hypot(TOLERANCE, noise))
        if change is None or len(self._logs) - change.since < LEAST_BLOCKS:
            return None
        if change.relative * self._reported > 0:
            return None
        self._reported = change.relative
        return math.expm1(statistics.fmean(self._logs[change.since :]))


class DriftMonitor:
    """Comparison of a job with its expectation, one block of whole steps at a time."""

    def __init__(self, expectation: Expectation) -> None:
        self.expectation = expected = expectation
        self._time = _Blocks("step time", expected.step_time_s, expected.step_time_interval_s)
        self._power = _Blocks("power", expected.power_W, expected.power_interval_W)
        self._blocks = self._steps = 0
        self._seconds = self._joules = 0.0
        self._drifts: list[Drift] = []

    def add_block(self, steps: int, seconds: float, joules: float) -> list[Drift]:
        """Add a block of whole steps; return the drifts that it shows for the first time."""
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._joules += joules
        self._blocks += 1
        drifts = []
        for blocks, value in ((self._time, seconds / steps), (self._power, joules / seconds)):
            relative = blocks.add(value) if value > 0 else None
            if relative is not None:
                drifts.append(self._drift(blocks.quantity, relative))
        self._drifts += drifts
        return drifts

    def _drift(self, name: Quantity, relative: float) -> Drift:
        word = "more" if relative > 0 else "less"
        estimated = label(self.expectation.meter.mark if name == "power" else "")
        sentence = (
            f"drift after {self._steps} steps: {name}{estimated} is {100 * abs(relative):.1f} % "
            f"{word} than was measured for this configuration"
        )
        return Drift(name, self._steps, relative, sentence)

    def summary(self) -> RunSummary:
        """Return the comparison so far."""
        expected = self.expectation
        if not self._steps:
            sentence = "The job ended before its steps could be compared."
            return RunSummary(expected, 0, 0.0, 0.0, sentence=sentence)

        def figures(step_time_s: float, power_W: float) -> dict[str, float]:
            energy_J = power_W * step_time_s
            return {"step_time_s": step_time_s, "power_W": power_W, "energy_per_step_J": energy_J}

        observed = figures(self._seconds / self._steps, self._joules / self._seconds)
        measured = figures(expected.step_time_s, expected.power_W)
        relative = {name: observed[name] / measured[name] - 1 for name in observed}
        estimated = label(expected.meter.mark)
        text = (
            f"{self._steps} steps in {number(self._seconds)} s and "
            f"{energy_text(self._joules / 1000)}{estimated}: a step took "
            f"{number(observed['step_time_s'])} s ({100 * relative['step_time_s']:+.1f} % against "
            f"the study) and {number(observed['energy_per_step_J'])} J"
            f" ({100 * relative['energy_per_step_J']:+.1f} %). "
        )
        if self._drifts:
            quantities = dict.fromkeys(drift.quantity for drift in self._drifts)
            text += f"Drift from the study's measurement: {' and '.join(quantities)}."
        elif self._blocks < LEAST_BLOCKS:
            text += "The job was too short to tell whether it drifted from the study's measurement."
        else:
            text += "No drift from the study's measurement was detected."
        return RunSummary(
            expected,
            self._steps,
            self._seconds,
            self._joules,
            observed,
            relative,
            tuple(self._drifts),
            text,
        )
