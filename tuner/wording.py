"""How figures are written for people: units, digits, intervals, and the word "estimated".

One study's figures share one unit of energy and one of time, picked by their size, so that a table
can be read down and a plot against a table. Every energy or power that nobody metered is followed
by the word "estimated", and the only place where that is decided is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_spaces.configuration import Configuration
from search_spaces.knobs import KNOBS, Value
from tuner.result import Point, Result

__all__ = [
    "Units",
    "change",
    "comparison",
    "is_estimated",
    "knob_text",
    "knobs",
    "label",
    "number",
    "ordered_knobs",
    "payback",
    "percent",
    "prediction",
    "unit_of_work",
    "units_of",
    "varying_knobs",
]

_ENERGY_UNITS = (("J", 1e-3, 0.1), ("kJ", 1.0, 1e5), ("MJ", 1e3, 1e8), ("GJ", 1e6, math.inf))
_TIME_UNITS = (("s", 1.0, 7200.0), ("h", 3600.0, 100 * 3600.0), ("days", 86400.0, math.inf))


@dataclass(frozen=True)
class Units:
    """The units in which one set of figures is written.

    Attributes:
        energy: "J", "kJ", "MJ" or "GJ".
        kJ: kilojoules in one of them.
        time: "s", "h" or "days".
        s: seconds in one of them.
    """

    energy: str = "kJ"
    kJ: float = 1.0
    time: str = "s"
    s: float = 1.0

    @classmethod
    def for_values(cls, energies_kJ: Iterable[float], times_s: Iterable[float]) -> Units:
        """The units in which the largest finite value has at most five digits before the point."""

        def pick(table: Sequence[tuple[str, float, float]], values: Iterable[float]) -> int:
            largest = max((abs(v) for v in values if math.isfinite(v)), default=1.0)
            return next(i for i, (_, _, limit) in enumerate(table) if largest < limit)

        energy, kJ, _ = _ENERGY_UNITS[pick(_ENERGY_UNITS, energies_kJ)]
        time, s, _ = _TIME_UNITS[pick(_TIME_UNITS, times_s)]
        return cls(energy, kJ, time, s)

    def energy_text(self, energy_kJ: float) -> str:
        return f"{number(energy_kJ / self.kJ)} {self.energy}"

    def time_text(self, time_s: float) -> str:
        return f"{number(time_s / self.s)} {self.time}"

    def interval_text(self, interval: tuple[float, float], per: float) -> str:
        """ "9.1 to 9.6": both ends divided by `per`; empty where an end is not finite."""
        low, high = interval
        if not (math.isfinite(low) and math.isfinite(high)):
            return ""
        return f"{number(low / per)} to {number(high / per)}"


def _every_point(result: Result) -> list[Point]:
    named = (point for point in (result.best, result.baseline) if point is not None)
    return [*result.points, *result.front_points, *named]


def units_of(result: Result) -> Units:
    """The units of a result's points."""
    points = _every_point(result)
    return Units.for_values(
        (p.energy_to_solution_kJ for p in points), (p.time_to_solution_s for p in points)
    )


def number(value: float) -> str:
    """Three significant digits, thousands separated, no exponent: "1,234", "12.3", "0.0123"."""
    if not math.isfinite(value):
        return "unknown"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 9)}f}"


def percent(share: float) -> str:
    """ "12 %", "3.4 %": one decimal below ten."""
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:,.0f} %"


def is_estimated(result: Result) -> bool:
    """Whether any energy of the result was estimated instead of metered."""
    points = _every_point(result)
    return any(p.meter.estimated for p in points) or any(
        record.meter.estimated for record in result.failures
    )


def prediction(result: Result) -> str:
    """What every page says of a study that ran on a simulated cluster; "" for any other."""
    points = _every_point(result)
    meters = [p.meter for p in points] + [record.meter for record in result.failures]
    if not any(meter.name == "simulated" for meter in meters):
        return ""
    return (
        "A prediction: every figure is the analytic models', nothing was measured. Their known "
        "error is told by `tuner predict` and by `python -m benchmarks.published`."
    )


def label(estimated: bool) -> str:
    """What follows an energy or a power: " (estimated)" or nothing."""
    return " (estimated)" if estimated else ""


def change(now: float, before: float, less: str, more: str) -> str:
    """ "23 % less energy" from the words for a fall and for a rise."""
    share = now / before - 1 if before else math.nan
    if not math.isfinite(share):
        return f"an unknown change: {less}"
    if abs(share) < 0.0005:
        noun = less.removeprefix("less ")
        return f"the same {noun}" if noun != less else "no difference"
    return f"{percent(abs(share))} {less if share < 0 else more}"


def _apart(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[1] < b[0] or b[1] < a[0]


def comparison(result: Result, units: Units) -> str:
    """What the choice saves against the baseline, in a sentence; empty where either is missing."""
    best, baseline = result.best, result.baseline
    if best is None or baseline is None:
        return ""
    if best.configuration == baseline.configuration:
        return "The choice is the baseline itself: nothing better was found."
    estimated = ", estimated" if best.meter.estimated or baseline.meter.estimated else ""
    text = (
        "Against the baseline it takes "
        + change(
            best.energy_to_solution_kJ, baseline.energy_to_solution_kJ, "less energy", "more energy"
        )
        + f" ({units.energy_text(baseline.energy_to_solution_kJ)} → "
        + f"{units.energy_text(best.energy_to_solution_kJ)}{estimated}) and "
        + change(best.time_to_solution_s, baseline.time_to_solution_s, "less time", "more time")
        + f" ({units.time_text(baseline.time_to_solution_s)} → "
        + f"{units.time_text(best.time_to_solution_s)})."
    )
    unclear = [
        name
        for name, mine, theirs in (
            ("energy", best.energy_interval_kJ, baseline.energy_interval_kJ),
            ("time", best.time_interval_s, baseline.time_interval_s),
        )
        if not _apart(mine, theirs)
    ]
    if unclear:
        text += f" The 90 % intervals overlap in {' and in '.join(unclear)}."
    return text


def unit_of_work(result: Result) -> str:
    """What one of the result's steps is: "optimizer step", or a recorded table's "epoch"."""
    return str(result.about.get("unit_of_work", "optimizer step"))


def payback(result: Result) -> str:
    """After how much training the savings repay the search, in a sentence."""
    steps, share = result.spent.payback_steps, result.spent.payback_share
    if result.points and result.spent.energy_kJ == 0:
        return "Nothing was spent on a search."
    if result.best is None or result.baseline is None:
        return "There is no choice and baseline to compare, so nothing is known about payback."
    if steps is None or share is None or not math.isfinite(steps):
        return "The choice saves no energy against the baseline, so the search is not repaid."
    text = f"The savings repay the search after {number(math.ceil(steps))} {unit_of_work(result)}s"
    if share <= 1:
        return f"{text} ({percent(share)} of the job)."
    return f"{text}: {number(share)} runs of the whole job."


def knob_text(name: str, value: Value | None) -> str:
    """ "micro_batch=4"; a knob left alone reads "clock_MHz=device's own"."""
    if value is None:
        return f"{name}=device's own"
    return f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def ordered_knobs(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """Every knob that one of them sets: standard ones first, in their order, then by name."""
    names = {name for c in configurations for half in (c.launch, c.live) for name in half}
    order = list(KNOBS)
    return tuple(sorted(names, key=lambda n: (order.index(n) if n in order else len(order), n)))


def varying_knobs(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """The knobs that have more than one value among them, in the order of `ordered_knobs`."""
    every = list(configurations)
    return tuple(name for name in ordered_knobs(every) if len({c.get(name) for c in every}) > 1)


def knobs(configuration: Configuration, names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The configuration's knobs as texts: those of `names`, or all that it sets, standard first."""
    names = ordered_knobs([configuration]) if names is None else names
    return tuple(knob_text(name, configuration.get(name)) for name in names)
