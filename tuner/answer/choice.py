"""Choice of one measured configuration under the limits and the objective of the training job.

An energy budget asks for the fastest configuration that fits, a deadline for the least energy in
time; caps on power and on GPUs bound either, and an `objective` says otherwise what is to be least.
With neither, what is better than the baseline in both energy and time is chosen. What only seems to
meet the limits by luck is passed over. If nothing can meet them, the nearest point is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from tuner.answer.parts import Choice, Point
from tuner.formatting import Units, label, number, percent, probability
from tuner.pareto import knee, nondominated
from tuner.problem.constraints import Constraints, JobFigures, Limit, Limits
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord

#: Returns the probability that a point meets each limit, and that it meets all.
Chance = Callable[[Point, Constraints], tuple[dict[str, float], float]]

#: Below this probability a configuration is not chosen for its limits.
LIKELY = 0.5
#: Share by which a point may need more energy or time than the baseline and still count as no
#: worse in it, and by which it may miss the least of an objective for a greater share of the other.
SAME = 0.01

#: Rule of the choice where nothing was asked and the baseline was measured.
BOTH = "better-in-both"
#: From this factor on, an overshoot is shown as "3.2 times" instead of in per cent.
MANY_TIMES = 3.0
#: From this factor on, a limit is out of reach.
OUT_OF_REACH = 100.0
#: Joules in a kilowatt-hour, in thousands.
KJ_PER_KWH = 3600.0


def energy_cost_of(point: Point, constraints: Constraints) -> float:
    """Return the price of the whole job's energy."""
    return (constraints.price_per_kWh or 0.0) * point.inferred.energy_to_solution_kJ / KJ_PER_KWH


def cost_of(point: Point, constraints: Constraints) -> float:
    """Return the price of the whole job: its energy and the hours of each rank."""
    hours = point.inferred.time_to_solution_s / 3600 * point.configuration.world_size
    return energy_cost_of(point, constraints) + (constraints.price_per_gpu_hour or 0.0) * hours


def carbon_g(point: Point, constraints: Constraints) -> float:
    """Return the grams of CO2 equivalent of the whole job's energy."""
    return (
        (constraints.grid_gCO2_per_kWh or 0.0) * point.inferred.energy_to_solution_kJ / KJ_PER_KWH
    )


def figures_of(points: Sequence[Point]) -> JobFigures:
    """Return the figures of points that limits are on, (points,), as `Point.inferred`.

    An unknown peak counts as infinite: without samples it cannot be shown that a limit is met.
    """
    peaks = [math.inf if point.peak_power_W is None else point.peak_power_W for point in points]
    return JobFigures(
        np.array([point.inferred.energy_to_solution_kJ for point in points]),
        np.array([point.inferred.time_to_solution_s for point in points]),
        np.array([point.inferred.power_W for point in points]),
        np.array(peaks),
        np.array([point.configuration.world_size for point in points]),
    )


def _as_measured(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
    ratios = constraints.limits.ratios(figures_of([point]))
    met = {name: float(ratio[0] <= 1) for name, ratio in ratios.items()}
    return met, float(all(met.values()))


def _unmet(points: Sequence[Point], limits: Limits, units: Units) -> str:
    ratios = limits.ratios(figures_of(points))
    shown = limits.ratios(figures_of([as_shown(point) for point in points]))
    met, unmet, least = [], [], []
    for row, limit in limits.given:
        called = row.noun
        ratio = float(ratios[row.name].min())
        if ratio <= 1:
            met.append(f"the {called}")
            continue
        unmet.append(f"the {called}")
        if not math.isfinite(ratio):
            least.append("no probe recorded its peak power")
            continue
        # The figure of a table; one that meets the limit only by luck is told as it counts.
        measured = float(shown[row.name].min())
        ratio = measured if measured > 1 else ratio
        least.append(_least_found(row, limit, ratio, units))
    how = points[0].source
    if not unmet:
        every = "both" if len(met) == 2 else "all of them"
        return f"T{_listed(met)[1:]} can each be met, but nothing {how} meets {every}."
    verdict = f"nothing {how} meets {_listed(unmet, 'or')}"
    verdict = f"{_listed(met)} can be met, but {verdict}" if met else verdict
    return f"{verdict[0].upper()}{verdict[1:]}: {'; '.join(least)}."


def _least_found(row: Limit, limit: float, ratio: float, units: Units) -> str:
    nearest = limit * ratio
    for digits in range(3, 8):  # until the two differ in print
        found, limits = row.text(nearest, units, digits), row.text(limit, units, digits)
        if found != limits and f"{nearest:.{digits}g}" != f"{limit:.{digits}g}":
            break
    if ratio >= MANY_TIMES:  # too far for one unit
        own = Units.for_values([limit], [limit])
        limits = row.text(limit, own, 3)
        if ratio >= OUT_OF_REACH:
            return f"{limits} is out of reach, and the least found is {found}"
        return f"the least found is {found}, {number(ratio)} times the {row.noun} of {limits}"
    share = percent(ratio - 1) if ratio >= 1.0005 else "less than 0.1 %"
    return f"the least found is {found}, {share} beyond the {row.noun} of {limits}"


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


def _score(point: Point, constraints: Constraints) -> tuple[float, float]:
    energy, time = point.inferred.energy_to_solution_kJ, point.inferred.time_to_solution_s
    if constraints.goal == "time":
        return time, energy
    cost = cost_of(point, constraints)
    values = {"energy": energy, "edp": energy * time, "cost": cost, "carbon": energy}
    return values[constraints.goal], time


def _knee_of(points: Sequence[Point]) -> Point:
    figures = [point.inferred for point in points]
    return points[knee([(p.energy_to_solution_kJ, p.time_to_solution_s) for p in figures])]


def front_of(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that are non-dominated by their estimates, fastest first as measured."""
    figures = [point.inferred for point in points]
    energy = np.array([each.energy_to_solution_kJ for each in figures], dtype=float)
    time = np.array([each.time_to_solution_s for each in figures], dtype=float)
    kept = [point for point, on in zip(points, nondominated(energy, time), strict=True) if on]
    return tuple(sorted(kept, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ)))


class Best(NamedTuple):
    """The chosen point.

    Attributes:
        met: True if it meets the limits.
        not_least: True if another has less of the objective, by at most `SAME`.
    """

    point: Point
    met: bool
    not_least: bool = False


def best_of(
    points: Sequence[Point],
    constraints: Constraints,
    baseline: Point | None,
    chance: Chance,
    figures: JobFigures | None = None,
) -> Best:
    """Choose among one or more points.

    Args:
        figures: `figures_of` the points, where many choices are made of the same ones.
    """
    limits = constraints.limits
    if not limits and constraints.objective is None:
        if (rival := _rival(constraints, baseline)) is None:
            return Best(_knee_of(front_of(points)), True)
        fits = [p for p in points if max(ratios_to(rival, p)) <= 1 + SAME]
        # Only a baseline that is no candidate, as one that does not fit in memory, leaves none.
        return Best(min(fits or points, key=lambda p: math.prod(ratios_to(rival, p))), True)
    worst = np.broadcast_to(limits.worst_ratio(figures or figures_of(points)), len(points))
    fits = [point for point, ratio in zip(points, worst, strict=True) if ratio <= 1]
    if not fits:
        pairs = zip(worst, points, strict=True)
        return Best(min(pairs, key=lambda pair: (pair[0], pair[1].time_to_solution_s))[1], False)

    def is_likely(point: Point) -> bool:
        return not limits or chance(point, constraints)[1] >= LIKELY

    # If luck alone makes each seem to fit, the best by the means is chosen, with its probability.
    if constraints.goal == "knee":
        return Best(_knee_of(front_of(list(filter(is_likely, fits)) or fits)), True)

    score = partial(_score, constraints=constraints)

    def with_the_other(point: Point) -> float:
        value, other = score(point)
        product = value if constraints.goal == "edp" else value * other
        return product if math.isfinite(product) else math.inf  # without energy

    fits.sort(key=score)
    least = next(filter(is_likely, fits), fits[0])
    most = score(least)[0] * (1 + SAME)
    equal = sorted((point for point in fits if score(point)[0] <= most), key=with_the_other)
    best = next(filter(is_likely, equal), least)
    return Best(best, True, not_least=score(best)[0] > score(least)[0])


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
    limits, rule = constraints.limits, _rule(constraints, baseline)
    if not points:
        return None, Choice(rule, False, "Nothing was measured, so there is nothing to choose.")
    units = Units.of([*points, *beside])
    found = best_of(points, constraints, baseline, chance)
    best, met = found.point, found.met
    if met:
        reason = _reason(found, constraints, baseline, units)
    else:
        reason = f"{_unmet(points, limits, units)} Nearest"
    sentence = f"{reason}: {_needs(best, constraints, units)}."
    probabilities, every = chance(best, constraints)
    if constraints.max_slowdown is not None and constraints.baseline_time_s is None:
        met = False
        sentence += " The limit on slowdown was not applied, because today was not measured."
    if limits and met:
        sentence += f" It meets {'this' if len(limits.given) == 1 else 'all of it'} with a "
        sentence += f"probability of {probability(every)}."
    return best, Choice(
        rule,
        met,
        sentence,
        objective=constraints.goal if rule != BOTH else BOTH,
        p_met=probabilities,
        p_all_met=every if limits else None,
        objective_value=_value(best, constraints),
    )


def _reason(found: Best, constraints: Constraints, baseline: Point | None, units: Units) -> str:
    limits = constraints.limits
    if not limits and constraints.objective is None:
        if (rival := _rival(constraints, baseline)) is None:
            return "Without limits the knee of the front is chosen"
        if found.point.configuration == rival.configuration:
            return "Nothing is better than today in both energy and time"
        if max(ratios_to(rival, found.point)) > 1 + SAME:  # today is no candidate
            return _GOALS["edp"]
        return "Best in both energy and time"
    goal = _GOALS[constraints.goal]
    if found.not_least:
        goal += f" but for {100 * SAME:.0f} %"
    words = [goal, *([limits.phrase(units)] if limits else [])]
    if limits.slowdown is not None:
        words.append(f"({percent(limits.slowdown)} more than today)")
    return " ".join(words)


def _rule(constraints: Constraints, baseline: Point | None) -> str:
    words = [row.name for row, _ in constraints.limits.given]
    words += [constraints.objective] if constraints.objective else []
    if constraints.max_slowdown is not None:
        words.insert(0, "max_slowdown")
    return " + ".join(words) or (BOTH if baseline is not None else "knee")


def _rival(constraints: Constraints, baseline: Point | None) -> Point | None:
    # The baseline, where a choice is to be better than it in both; None where something was asked.
    return baseline if _rule(constraints, baseline) == BOTH else None


def _needs(point: Point, constraints: Constraints, units: Units) -> str:
    mark, price = label(point.meter.mark), ""
    if constraints.goal == "cost":
        price = f", and costs {number(cost_of(as_shown(point), constraints))} at the prices given"
    elif constraints.goal == "carbon":
        price = f", and emits {number(carbon_g(as_shown(point), constraints))} g of CO2"
    energy = point.meter.shown(f"{units.energy_text(point.energy_to_solution_kJ)}{mark} and ")
    power = point.meter.shown(f" at {number(point.power_W)} W{mark}{price}")
    time = units.time_text(point.time_to_solution_s)
    return f"{point.configuration.short} needs {energy}{time}{power}"


def ratios_to(today: Point, point: Point) -> tuple[float, float]:
    """Return the estimated energy and time of a point over those of another."""
    before, after = today.inferred, point.inferred
    return (
        after.energy_to_solution_kJ / before.energy_to_solution_kJ,
        after.time_to_solution_s / before.time_to_solution_s,
    )


def as_shown(point: Point) -> Point:
    """Return a point of which what was measured counts, as the reader sees it."""
    return replace(point, estimate=None)


def _value(point: Point, constraints: Constraints) -> float | None:
    shown = as_shown(point)
    if constraints.goal == "carbon":
        return carbon_g(shown, constraints)
    return None if constraints.goal == "knee" else _score(shown, constraints)[0]


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
