"""The choice: one measured configuration under what the user asked of the training job.

An energy budget asks for the fastest configuration that fits, a deadline for the least energy in
time; caps on power and on GPUs bound either, and an `objective` says otherwise what is to be least.
With neither, what is better than the baseline in both energy and time is chosen. What only seems to
meet the limits by luck is passed over. If nothing can meet them, the nearest point is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tuner.formatting import Units, label, number, percent, probability
from tuner.pareto import knee, nondominated
from tuner.problem.constraints import Constraints, JobFigures, given_limits
from tuner.results.parts import Choice, Point
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import ProbeRecord

#: Returns the probability that a point meets each limit, and that it meets all.
Chance = Callable[[Point, Constraints], tuple[dict[str, float], float]]

#: Below this probability a configuration is not chosen for its limits.
LIKELY = 0.5
#: Share by which a point may need more energy or time than the baseline and still count as no
#: worse in it.
SAME = 0.01

#: Rule of the choice where nothing was asked and the baseline was measured.
BOTH = "better-in-both"
#: From this factor on, an overshoot is shown as "3.2 times" instead of in per cent.
MANY_TIMES = 3.0
#: Joules in a kilowatt-hour, in thousands.
KJ_PER_KWH = 3600.0


def cost_of(point: Point, rates: Mapping[str, float]) -> float:
    """Return the price of the whole job: its energy and the hours of each rank."""
    per_kWh = rates.get("price_per_kWh", 0.0)
    per_hour = rates.get("price_per_gpu_hour", 0.0)
    hours = point.time_to_solution_s / 3600
    return (
        per_kWh * point.energy_to_solution_kJ / KJ_PER_KWH
        + per_hour * hours * point.configuration.world_size
    )


def carbon_g(point: Point, rates: Mapping[str, float]) -> float:
    """Return the grams of CO2 equivalent of the whole job's energy (`Constraints.rates`)."""
    return rates.get("grid_gCO2_per_kWh", 0.0) * point.energy_to_solution_kJ / KJ_PER_KWH


def excess(point: Point, constraints: Constraints) -> dict[str, float]:
    """Return by which share the point exceeds each limit; 0 or less if it meets it."""
    figures = JobFigures(
        point.energy_to_solution_kJ,
        point.time_to_solution_s,
        point.power_W,
        point.peak_power_W,
        point.configuration.world_size,
    )
    # Without samples it cannot be shown that a limit on the peak is met.
    unknown = dict.fromkeys(constraints.limits, math.inf)
    return unknown | constraints.excess(figures)


def _as_measured(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
    met = {name: float(beyond <= 0) for name, beyond in excess(point, constraints).items()}
    return met, float(all(met.values()))


def _worst(point: Point, constraints: Constraints) -> float:
    return max(excess(point, constraints).values(), default=0.0)


def limits_phrase(limits: Mapping[str, float], units: Units) -> str:
    """Return the limits of the training job as in "within 25 kJ and on at most 2 GPUs"."""
    return " and ".join(row.phrase(value, units) for row, value in given_limits(limits))


def _unmet(points: Sequence[Point], constraints: Constraints, units: Units) -> str:
    met, unmet, least = [], [], []
    for row, limit in given_limits(constraints.limits):
        called = row.noun
        beyond = min(excess(point, constraints)[row.name] for point in points)
        if beyond <= 0:
            met.append(f"the {called}")
            continue
        unmet.append(f"the {called}")
        if not math.isfinite(beyond):
            least.append("no probe recorded its peak power")
            continue
        nearest = limit * (1 + beyond)
        for digits in range(3, 8):  # until the two are told apart
            found, asked = row.text(nearest, units, digits), row.text(limit, units, digits)
            if found != asked and f"{nearest:.{digits}g}" != f"{limit:.{digits}g}":
                break
        times = f"{number(1 + beyond)} times the {called} of {asked}"
        share = percent(beyond) if beyond >= 0.0005 else "less than 0.1 %"
        share += f" beyond the {called} of {asked}"
        least.append(f"the least found is {found}, {times if beyond >= MANY_TIMES - 1 else share}")
    how = "predicted" if points[0].source == "predicted" else "measured"
    if not unmet:
        every = "both" if len(met) == 2 else "all of them"
        return f"T{_listed(met)[1:]} can each be met, but nothing {how} meets {every}."
    verdict = f"nothing {how} meets {_listed(unmet, 'or')}"
    verdict = f"{_listed(met)} can be met, but {verdict}" if met else verdict
    return f"{verdict[0].upper()}{verdict[1:]}: {'; '.join(least)}."


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_GOALS = {
    "energy": "Least energy",
    "time": "Fastest",
    "edp": "Least product of energy and time",
    "cost": "Least cost",
    "carbon": "Least carbon",
    "knee": "Knee of the front",
}


def _score(point: Point, objective: str, constraints: Constraints) -> tuple[float, float]:
    energy, time = point.energy_to_solution_kJ, point.time_to_solution_s
    if objective == "time":
        return time, energy
    cost = cost_of(point, constraints.rates)
    return {"energy": energy, "edp": energy * time, "cost": cost, "carbon": energy}[objective], time


def _knee_of(points: Sequence[Point]) -> Point:
    return points[knee([(p.energy_to_solution_kJ, p.time_to_solution_s) for p in points])]


def front_of(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the non-dominated points, fastest first."""
    energy = np.array([point.energy_to_solution_kJ for point in points], dtype=float)
    time = np.array([point.time_to_solution_s for point in points], dtype=float)
    kept = [point for point, on in zip(points, nondominated(energy, time), strict=True) if on]
    return tuple(sorted(kept, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ)))


def decide(
    points: Sequence[Point],
    constraints: Constraints,
    baseline: Point | None = None,
    *,
    chance: Chance = _as_measured,
    beside: Sequence[Point] = (),
) -> tuple[Point | None, Choice]:
    """Choose among measured points; None if there are none.

    Args:
        points: all of them, not the front alone, because under a power cap the best that fits may
            be dominated by one that does not.
        beside: other points that the reader sees, so that a page has one unit of energy and time.
    """
    asked, objective = constraints.limits, constraints.goal
    rule = _rule(constraints, baseline)
    if not points:
        return None, Choice(rule, False, "Nothing was measured, so there is nothing to choose.")
    units, met = Units.of([*points, *beside, *([baseline] if baseline else [])]), True
    if not asked and constraints.objective is None:
        if rule != BOTH or baseline is None:
            best = _knee_of(front_of(points))
            text = "Without limits the knee of the front is chosen"
        else:
            fits = [p for p in points if max(ratios_to(baseline, p)) <= 1 + SAME]
            # Only a baseline that is no candidate, as one that does not fit in memory, leaves none.
            best = min(fits or points, key=lambda point: math.prod(ratios_to(baseline, point)))
            text = "Best in both energy and time"
            if best.configuration == baseline.configuration:
                text = "Nothing is better than today in both energy and time"
    elif fits := [point for point in points if _worst(point, constraints) <= 0]:
        # If luck alone makes each seem to fit, the first stands, with its probability.
        fits = [p for p in fits if not asked or chance(p, constraints)[1] >= LIKELY] or fits
        if objective == "knee":
            best = _knee_of(front_of(fits))
        else:
            best = min(fits, key=lambda point: _score(point, objective, constraints))
        words = [_GOALS[objective], *([limits_phrase(asked, units)] if asked else [])]
        if constraints.is_relative:
            words.append(f"({percent(constraints.max_slowdown or 0)} more than today)")
        text = " ".join(words)
    else:
        best = min(points, key=lambda point: (_worst(point, constraints), point.time_to_solution_s))
        met, text = False, f"{_unmet(points, constraints, units)} Nearest"
    sentence = f"{text}: {_needs(best, constraints, units)}."
    probabilities, every = chance(best, constraints)
    if constraints.max_slowdown is not None and constraints.baseline_time_s is None:
        met = False
        sentence += " The limit on slowdown was not applied, because today was not measured."
    if asked and met:
        sentence += f" It meets {'this' if len(asked) == 1 else 'all of it'} with a "
        sentence += f"probability of {probability(every)}."
    return best, Choice(
        rule,
        met,
        sentence,
        objective=objective if rule != BOTH else BOTH,
        p_met=probabilities,
        p_all_met=every if asked else None,
        objective_value=_value(best, objective, constraints),
    )


def _rule(constraints: Constraints, baseline: Point | None) -> str:
    words = [*constraints.limits, *([constraints.objective] if constraints.objective else [])]
    if constraints.max_slowdown is not None:
        words.insert(0, "max_slowdown")
    return " + ".join(words) or (BOTH if baseline is not None else "knee")


def _needs(point: Point, constraints: Constraints, units: Units) -> str:
    mark, price, rates = label(point.meter.mark), "", constraints.rates
    if constraints.goal == "cost":
        price = f", and costs {number(cost_of(point, rates))} at the prices given"
    elif constraints.goal == "carbon":
        price = f", and emits {number(carbon_g(point, rates))} g of CO2"
    return (
        f"{point.configuration.short} needs {units.energy_text(point.energy_to_solution_kJ)}{mark} "
        f"and {units.time_text(point.time_to_solution_s)} at {number(point.power_W)} W{mark}{price}"
    )


def ratios_to(today: Point, point: Point) -> tuple[float, float]:
    """Return the energy and time of a point over those of another."""
    return (
        point.energy_to_solution_kJ / today.energy_to_solution_kJ,
        point.time_to_solution_s / today.time_to_solution_s,
    )


def _value(point: Point, objective: str, constraints: Constraints) -> float | None:
    if objective == "carbon":
        return carbon_g(point, constraints.rates)
    return None if objective == "knee" else _score(point, objective, constraints)[0]


def never_measured(
    candidates: Sequence[Configuration], records: Sequence[ProbeRecord]
) -> tuple[Configuration, ...]:
    """Return the candidates that were not measured and whose launch did not fail."""
    measured = {
        Configuration(record.request.launch, window.live)
        for record in records
        for window in record.measurements
    }
    failed = {record.request.launch for record in records if not record.ok}
    failed -= {configuration.launch for configuration in measured}
    return tuple(c for c in candidates if c not in measured and c.launch not in failed)
