"""Drift detection for a training job: step time and power, compared with a measured point.

Each block of whole steps is compared with the interval of the point that the job was started from.
An ordinary test, repeated after every block, would raise a false alarm in the end; a confidence
sequence holds at all times together (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024,
"Time-uniform central limit theory and asymptotic confidence sequences", theorem 2.2). One runs over
the whole job, and one over each stretch of blocks, which detects a drift that begins late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.answer.parts import Point
from tuner.formatting import energy_text, label, number
from tuner.workload.records.probe import MeterInfo

#: Probability of a false alarm over the whole job, for each quantity.
LEVEL = 0.05
#: No drift is reported before this number of blocks: the sequence is asymptotic.
LEAST_BLOCKS = 5
#: Number of blocks in a stretch.
STRETCH = 40
#: Relative distance from the expected interval up to which a mean is no drift: windows are
#: measured to 1 %.
TOLERANCE = 0.01
#: Number of blocks for which the sequence is made as narrow as possible.
TIGHT_AT = 20


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


class ConfidenceSequence:
    """Confidence sequence for a mean: its interval ever excludes it with probability alpha."""

    def __init__(self, alpha: float) -> None:
        self.count = 0
        self.mean = self._squares = 0.0
        self._alpha = alpha
        log = -2 * math.log(alpha)
        self._rho = math.sqrt((log + math.log(log + 1)) / TIGHT_AT)

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def interval(self) -> tuple[float, float]:
        """Current interval; unbounded below `LEAST_BLOCKS` values."""
        n, rho = self.count, self._rho
        if n < LEAST_BLOCKS:
            return -math.inf, math.inf
        deviation = math.sqrt(self._squares / (n - 1))
        spread = n * rho**2 + 1
        reach = deviation * math.sqrt(
            2 * spread / (n**2 * rho**2) * math.log(math.sqrt(spread) / self._alpha)
        )
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Drift:
    """Drift of "step time" or "power" as a share of the expected value, with its 95 % interval."""

    quantity: str
    step: int
    relative: float
    low: float
    high: float
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
        others = {name: value for name, value in vars(self).items() if name != "expectation"}
        return {
            "promise": {**vars(self.expectation), "meter": dict(vars(self.expectation.meter))},
            **others,
            "observed": dict(self.observed),
            "relative": dict(self.relative),
            "drifts": [dict(vars(drift)) for drift in self.drifts],
        }


class _Quantity:
    # Confidence sequences of one quantity, on the logarithm of its ratio to the expected value.

    def __init__(self, name: str, expected: float, interval: tuple[float, float]) -> None:
        self.name, self.expected = name, expected
        low, high = interval
        self._low = math.log(low / self.expected) - TOLERANCE
        self._high = math.log(high / self.expected) + TOLERANCE
        self._whole = ConfidenceSequence(LEVEL / 2)
        self._stretches = 1
        self._stretch = ConfidenceSequence(self._share())
        self._reported_side = 0

    def _share(self) -> float:
        # Sums to LEVEL / 2 over all stretches: 6 / pi^2 x the sum of 1 / k^2 is 1.
        return LEVEL / 2 * 6 / (math.pi * self._stretches) ** 2

    def add(self, value: float) -> ConfidenceSequence | None:
        # Returns the sequence that shows a drift not yet reported.
        log = math.log(value / self.expected)
        self._whole.add(log)
        if self._stretch.count >= STRETCH:
            self._stretches += 1
            self._stretch = ConfidenceSequence(self._share())
        self._stretch.add(log)
        for sequence in (self._stretch, self._whole):
            low, high = sequence.interval
            side = 1 if low > self._high else -1 if high < self._low else 0
            if side and side != self._reported_side:
                self._reported_side = side
                return sequence
        return None


class DriftMonitor:
    """Comparison of a job with its expectation, one block of whole steps at a time."""

    def __init__(self, expectation: Expectation) -> None:
        self.expectation = expected = expectation
        self._time = _Quantity("step time", expected.step_time_s, expected.step_time_interval_s)
        self._power = _Quantity("power", expected.power_W, expected.power_interval_W)
        self._blocks = self._steps = 0
        self._seconds = self._joules = 0.0
        self._drifts: list[Drift] = []

    def add_block(self, steps: int, seconds: float, joules: float) -> list[Drift]:
        """Add a block of whole steps; return the drifts that it shows for the first time."""
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._joules += joules
        self._blocks += 1
        drifts = []
        for quantity, value in ((self._time, seconds / steps), (self._power, joules / seconds)):
            shown = quantity.add(value) if value > 0 else None
            if shown is not None:
                drifts.append(self._drift(quantity.name, shown))
        self._drifts += drifts
        return drifts

    def _drift(self, name: str, shown: ConfidenceSequence) -> Drift:
        low, high = (math.expm1(end) for end in shown.interval)
        relative = math.expm1(shown.mean)
        word = "more" if relative > 0 else "less"
        estimated = label(self.expectation.meter.mark if name == "power" else "")
        sentence = (
            f"drift after {self._steps} steps: {name}{estimated} is {100 * abs(relative):.1f} % "
            f"{word} than was measured for this configuration "
            f"[{100 * low:+.1f}, {100 * high:+.1f}] %"
        )
        return Drift(name, self._steps, relative, low, high, sentence)

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
