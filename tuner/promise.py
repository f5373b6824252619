"""Does a job that trains keep what was promised? Step time and power, checked block by block.

A promise is a measured point with its interval. While the job trains, blocks of whole steps say how
far it is off. The check may look after every block for as long as the job lasts, so an ordinary
test would cry wolf in the end; a confidence sequence does not: it holds at all times together
(Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, "Time-uniform central limit theory and
asymptotic confidence sequences", theorem 2.2). One runs over the whole job, and one over each
stretch of blocks, so that a drift that begins late is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.result import Point
from tuner.wording import label, number
from workload.probe import MeterInfo

__all__ = ["Drifted", "Kept", "Promise", "Sequence", "Watch"]

#: A drift is called one with at most this probability where there is none, for each quantity.
LEVEL = 0.05
#: Nothing is said of fewer blocks: the sequence is asymptotic.
LEAST_BLOCKS = 5
#: A stretch has so many blocks.
STRETCH = 40
#: A drift must be beyond the promise's interval by this much: windows are measured to 1 %.
TOLERANCE = 0.01
#: Blocks at which the sequence is as narrow as it can be made.
TIGHT_AT = 20


@dataclass(frozen=True)
class Promise:
    """What a point promises of each optimizer step.

    Attributes:
        key: the configuration.
        step_time_s, power_W: the point's.
        step_time_interval_s, power_interval_W: 90 % intervals.
        steps: optimizer steps of the job.
        meter: scope and source of the energy.
    """

    key: str
    step_time_s: float
    power_W: float
    step_time_interval_s: tuple[float, float]
    power_interval_W: tuple[float, float]
    steps: int
    meter: MeterInfo

    @classmethod
    def of(cls, point: Point, steps: int) -> Promise:
        low, high = point.time_interval_s
        return cls(
            key=point.configuration.key,
            step_time_s=point.time_to_solution_s / steps,
            power_W=point.power_W,
            step_time_interval_s=(low / steps, high / steps),
            power_interval_W=point.power_interval_W or (point.power_W, point.power_W),
            steps=steps,
            meter=point.meter,
        )


class Sequence:
    """A confidence sequence for a mean: an interval that holds at every number of values at once.

    Args:
        alpha: the probability that it ever leaves out the mean.
    """

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
        """The interval now; everything below `LEAST_BLOCKS` values."""
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
class Drifted:
    """A drift from the promise.

    Attributes:
        quantity: "step time" or "power".
        step: optimizer steps done when it was seen.
        relative: by how much it is off, as a share of the promise.
        low, high: its interval, at all times together (95 %).
        sentence: for people.
    """

    quantity: str
    step: int
    relative: float
    low: float
    high: float
    sentence: str


@dataclass(frozen=True)
class Kept:
    """What a job did, against what was promised.

    Attributes:
        promise: what was promised.
        steps: optimizer steps that were compared.
        seconds, joules: that they took, by the same meter.
        observed: step_time_s, power_W and energy_per_step_J; empty before the first block.
        relative: each as a share of the promise, minus 1.
        drifts: what was said while it trained.
        sentence: for people.
    """

    promise: Promise
    steps: int
    seconds: float
    joules: float
    observed: Mapping[str, float] = field(default_factory=dict)
    relative: Mapping[str, float] = field(default_factory=dict)
    drifts: tuple[Drifted, ...] = ()
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        promise = {**vars(self.promise), "meter": dict(vars(self.promise.meter))}
        return {
            **vars(self),
            "promise": promise,
            "observed": dict(self.observed),
            "relative": dict(self.relative),
            "drifts": [dict(vars(drift)) for drift in self.drifts],
        }


class _Quantity:
    """One quantity's sequences, and what was last said of it."""

    def __init__(self, name: str, promised: float, interval: tuple[float, float]) -> None:
        self.name, self.promised = name, promised
        low, high = interval
        self._low = math.log(low / promised) - TOLERANCE
        self._high = math.log(high / promised) + TOLERANCE
        self._whole = Sequence(LEVEL / 2)
        self._stretches = 1
        self._stretch = Sequence(self._share())
        self._said = 0

    def _share(self) -> float:
        # Sums to LEVEL / 2 over all stretches: 6 / pi^2 x the sum of 1 / k^2 is 1.
        return LEVEL / 2 * 6 / (math.pi * self._stretches) ** 2

    def add(self, value: float) -> Sequence | None:
        """The sequence that shows a drift which was not told yet."""
        log = math.log(value / self.promised)
        self._whole.add(log)
        if self._stretch.count >= STRETCH:
            self._stretches += 1
            self._stretch = Sequence(self._share())
        self._stretch.add(log)
        for sequence in (self._stretch, self._whole):
            low, high = sequence.interval
            side = 1 if low > self._high else -1 if high < self._low else 0
            if side and side != self._said:
                self._said = side
                return sequence
        return None


class Watch:
    """Compares a job with its promise, a block of whole steps at a time.

    Args:
        promise: what was promised.
    """

    def __init__(self, promise: Promise) -> None:
        self.promise = promise
        self._time = _Quantity("step time", promise.step_time_s, promise.step_time_interval_s)
        self._power = _Quantity("power", promise.power_W, promise.power_interval_W)
        self._blocks = self._steps = 0
        self._seconds = self._joules = 0.0
        self._drifts: list[Drifted] = []

    def block(self, steps: int, seconds: float, joules: float) -> list[Drifted]:
        """Tell of a block of whole steps; what drifted from the promise by now, said once.

        Args:
            steps: whole optimizer steps in it.
            seconds: that they took.
            joules: that the meter counted meanwhile.
        """
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._joules += joules
        self._blocks += 1
        found = []
        for quantity, value in ((self._time, seconds / steps), (self._power, joules / seconds)):
            shown = quantity.add(value) if value > 0 else None
            if shown is not None:
                found.append(self._drifted(quantity.name, shown))
        self._drifts += found
        return found

    def _drifted(self, name: str, shown: Sequence) -> Drifted:
        low, high = (math.expm1(end) for end in shown.interval)
        relative = math.expm1(shown.mean)
        word = "more" if relative > 0 else "less"
        estimated = label(self.promise.meter.estimated and name == "power")
        sentence = (
            f"drift after {self._steps} steps: {name}{estimated} is {100 * abs(relative):.1f} % "
            f"{word} than was measured for this configuration "
            f"[{100 * low:+.1f}, {100 * high:+.1f}] %"
        )
        return Drifted(name, self._steps, relative, low, high, sentence)

    def kept(self) -> Kept:
        """What is known by now."""
        promise = self.promise
        if not self._steps:
            return Kept(
                promise, 0, 0.0, 0.0, sentence="It ended before its steps could be compared."
            )
        observed = {
            "step_time_s": self._seconds / self._steps,
            "power_W": self._joules / self._seconds,
            "energy_per_step_J": self._joules / self._steps,
        }
        promised = {
            "step_time_s": promise.step_time_s,
            "power_W": promise.power_W,
            "energy_per_step_J": promise.power_W * promise.step_time_s,
        }
        relative = {name: observed[name] / promised[name] - 1 for name in observed}
        estimated = label(promise.meter.estimated)
        text = (
            f"{self._steps} steps in {number(self._seconds)} s and "
            f"{number(self._joules / 1000)} kJ{estimated}: a step took "
            f"{number(observed['step_time_s'])} s ({100 * relative['step_time_s']:+.1f} % of what "
            f"was promised) and {number(observed['energy_per_step_J'])} J"
            f" ({100 * relative['energy_per_step_J']:+.1f} %). "
        )
        if self._drifts:
            said = dict.fromkeys(drift.quantity for drift in self._drifts)
            text += f"It drifted from the promise in {' and in '.join(said)}."
        elif self._blocks < LEAST_BLOCKS:
            text += "It was too short to tell whether the promise was kept."
        else:
            text += "No drift from the promise was shown."
        return Kept(
            promise,
            self._steps,
            self._seconds,
            self._joules,
            observed,
            relative,
            tuple(self._drifts),
            text,
        )
