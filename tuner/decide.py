"""The choice: one measured configuration under what the user asked of the training job.

Constraints choose on the front, they do not cut it. `budget_kJ` asks for the fastest configuration
whose energy-to-solution fits, `deadline_s` for the least energy in time; caps on power and on GPUs
bound either. An `objective` says otherwise what is to be least, and with neither the knee is taken.
Each constraint carries the probability that it is met. Where nothing measured can meet what was
asked, the nearest point is returned, and the sentence says what could be asked instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.pareto import knee, nondominated
from tuner.result import Choice, Point
from tuner.settings import check_positive
from tuner.wording import Units, knobs, label, number, percent
from workload.spread import log_error

__all__ = ["OBJECTIVES", "Constraints", "decide", "front_of"]

#: What may be asked to be least.
OBJECTIVES = ("knee", "least-energy", "least-time", "least-edp", "least-cost", "least-carbon")
#: Joint draws behind a probability: its standard error is at most 0.01.
DRAWS = 2500
#: What is so many times what was asked is told so, and not in per cent.
MANY_TIMES = 3.0
#: Joules in a kilowatt-hour, in thousands.
KJ_PER_KWH = 3600.0


@dataclass(frozen=True)
class Constraints:
    """What the user asks of the training job.

    Attributes:
        budget_kJ: energy the whole job may use, in the meter's scope.
        deadline_s: time the whole job may take.
        power_cap_W: the job's average power may not exceed this.
        peak_power_W: no power sample of a window may exceed this. A point whose probe kept no
            samples is not known to meet it, and is passed over.
        max_gpus: ranks, each on a device of its own.
        objective: what is to be least among what meets them (`OBJECTIVES`); None: the knee where
            nothing is asked, the least energy under a deadline alone, else the least time.
        price_per_kWh: money for a kilowatt-hour, any currency; for "least-cost".
        price_per_gpu_hour: money for an hour of one GPU; for "least-cost".
        grid_gCO2_per_kWh: grams of CO2 equivalent for a kilowatt-hour, for "least-carbon". There is
            no default: a grid's intensity is the user's to know.

    Raises:
        InvalidValue: one of them is not a number greater than 0, or `max_gpus` no integer.
        UnknownName: there is no such objective.
        InputError: a price or an intensity is missing for the objective, or is given without it.
    """

    budget_kJ: float | None = None
    deadline_s: float | None = None
    power_cap_W: float | None = None
    peak_power_W: float | None = None
    max_gpus: int | None = None
    objective: str | None = None
    price_per_kWh: float | None = None
    price_per_gpu_hour: float | None = None
    grid_gCO2_per_kWh: float | None = None

    def __post_init__(self) -> None:
        for name in (*_LIMITS, *_PRICES, "grid_gCO2_per_kWh"):
            check_positive(name, getattr(self, name))
        if self.max_gpus is not None and type(self.max_gpus) is not int:
            raise InvalidValue("max_gpus", self.max_gpus, "an integer of at least 1")
        if self.objective is not None and self.objective not in OBJECTIVES:
            raise UnknownName("objective", str(self.objective), OBJECTIVES)
        if self.objective == "least-cost" and not any(self._prices):
            raise InputError(
                "least-cost needs price_per_kWh, price_per_gpu_hour or both; no price is assumed"
            )
        if self.objective == "least-carbon" and self.grid_gCO2_per_kWh is None:
            raise InputError(
                "least-carbon needs grid_gCO2_per_kWh, the intensity of your grid; none is assumed"
            )
        if self.objective != "least-cost" and any(self._prices):
            raise InputError("a price is for the objective least-cost")
        if self.objective != "least-carbon" and self.grid_gCO2_per_kWh is not None:
            raise InputError("grid_gCO2_per_kWh is for the objective least-carbon")

    @property
    def _prices(self) -> tuple[float, float]:
        return self.price_per_kWh or 0.0, self.price_per_gpu_hour or 0.0

    @property
    def asked(self) -> dict[str, float]:
        """The limits that were given, by name."""
        values = {name: getattr(self, name) for name in _LIMITS}
        return {name: float(value) for name, value in values.items() if value is not None}

    @property
    def stated(self) -> dict[str, Any]:
        """Everything that was given, by name: what study.toml keeps."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def excess(
        self,
        energy_kJ: float,
        time_s: float,
        power_W: float,
        *,
        peak_power_W: float | None = None,
        gpus: int | None = None,
    ) -> dict[str, float]:
        """By how much each is exceeded, as a share of it; 0 or less where it is kept.

        A limit on what is None here is left out.
        """
        values = {
            "budget_kJ": energy_kJ,
            "deadline_s": time_s,
            "power_cap_W": power_W,
            "peak_power_W": peak_power_W,
            "max_gpus": gpus,
        }
        found = {}
        for name, limit in self.asked.items():
            value = values[name]
            if value is not None:
                found[name] = value / limit - 1
        return found

    def cost(self, point: Point) -> float:
        """Money for the whole job: energy by its price, and each rank's hours by theirs."""
        per_kWh, per_hour = self._prices
        hours = point.time_to_solution_s / 3600
        return (
            per_kWh * point.energy_to_solution_kJ / KJ_PER_KWH
            + per_hour * hours * point.configuration.world_size
        )

    def carbon_g(self, point: Point) -> float:
        """Grams of CO2 equivalent for the whole job's energy."""
        return (self.grid_gCO2_per_kWh or 0.0) * point.energy_to_solution_kJ / KJ_PER_KWH


_LIMITS = ("budget_kJ", "deadline_s", "power_cap_W", "peak_power_W", "max_gpus")
_PRICES = ("price_per_kWh", "price_per_gpu_hour")


def _excess(point: Point, constraints: Constraints) -> dict[str, float]:
    excess = constraints.excess(
        point.energy_to_solution_kJ,
        point.time_to_solution_s,
        point.power_W,
        peak_power_W=point.peak_power_W,
        gpus=point.configuration.world_size,
    )
    if constraints.peak_power_W is not None and "peak_power_W" not in excess:
        excess["peak_power_W"] = math.inf  # nobody recorded it, so nobody can promise it
    return excess


def _worst(point: Point, constraints: Constraints) -> float:
    return max(_excess(point, constraints).values(), default=0.0)


def _probabilities(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
    """Probability that each constraint is met, and that all are.

    Log time and log power are drawn as independent normals of the point's intervals; energy is
    their product. A peak and a number of GPUs are met or not.
    """
    excess = _excess(point, constraints)
    normal = np.random.default_rng(0).standard_normal((2, DRAWS))
    log_time, time_se = _log_normal(point.time_to_solution_s, point.time_interval_s)
    log_energy, energy_se = _log_normal(point.energy_to_solution_kJ, point.energy_interval_kJ)
    power_se = math.sqrt(max(energy_se**2 - time_se**2, 0.0))
    time = log_time + time_se * normal[0]
    power = math.log(point.power_W) + power_se * normal[1]
    energy = log_energy + time_se * normal[0] + power_se * normal[1]
    drawn = {"budget_kJ": energy, "deadline_s": time, "power_cap_W": power}
    met, every = {}, np.ones(DRAWS, dtype=bool)
    for name, limit in constraints.asked.items():
        if name in drawn:
            holds = drawn[name] <= math.log(limit)
        else:
            holds = np.full(DRAWS, excess[name] <= 0)
        met[name] = float(holds.mean())
        every &= holds
    return met, float(every.mean())


def _log_normal(value: float, interval: tuple[float, float]) -> tuple[float, float]:
    """Mean and standard error of the logarithm, from a value and its 90 % interval."""
    return math.log(value), log_error(interval)


def _energy_asked(value_kJ: float, units: Units) -> str:
    """In the unit of the points, and as it was asked where that is another one."""
    also = "" if units.energy == "kJ" else f" ({value_kJ:,g} kJ)"
    return units.energy_text(value_kJ) + also


def _time_asked(value_s: float, units: Units) -> str:
    """The same for a time."""
    return units.time_text(value_s) + ("" if units.time == "s" else f" ({value_s:,g} s)")


def _phrase(asked: Mapping[str, float], units: Units) -> str:
    words: dict[str, Callable[[float], str]] = {
        "budget_kJ": lambda value: f"within {_energy_asked(value, units)}",
        "deadline_s": lambda value: f"within {_time_asked(value, units)}",
        "power_cap_W": lambda value: f"at no more than {number(value)} W on average",
        "peak_power_W": lambda value: f"at no more than {number(value)} W at any moment",
        "max_gpus": lambda value: f"on at most {value:.0f} GPU{'s' * (value != 1)}",
    }
    return " and ".join(words[name](value) for name, value in asked.items())


#: The same figures as the object of a sentence.
_LEAST: dict[str, Callable[[float, Units], str]] = {
    "budget_kJ": lambda value, units: units.energy_text(value),
    "deadline_s": lambda value, units: units.time_text(value),
    "power_cap_W": lambda value, units: f"{number(value)} W on average",
    "peak_power_W": lambda value, units: f"a peak of {number(value)} W",
    "max_gpus": lambda value, units: f"{value:.0f} GPU{'s' * (round(value) != 1)}",
}


def _instead(points: Sequence[Point], constraints: Constraints, units: Units) -> str:
    """What could be asked instead: for each limit that no point keeps, the least there is."""
    least, unknown = [], ""
    for name in constraints.asked:
        excess = [_excess(point, constraints)[name] for point in points]
        if min(excess) <= 0:
            continue
        limit = constraints.asked[name] * (1 + min(excess))
        if not math.isfinite(limit):
            unknown = " No probe recorded its peak power."
        else:
            least.append(_LEAST[name](limit, units))
    if not least:
        return unknown.strip() or "Each of these can be met alone, but not together."
    alone = ", each by itself" if len(least) > 1 else ""
    return f"The least that was measured is {' and '.join(least)}{alone}.{unknown}"


_GOALS = {
    "least-energy": "Least energy",
    "least-time": "Fastest",
    "least-edp": "Least product of energy and time",
    "least-cost": "Least cost",
    "least-carbon": "Least carbon",
    "knee": "Knee of the front",
}


def _score(objective: str, constraints: Constraints) -> Callable[[Point], tuple[float, float]]:
    """What is to be least, and what decides between equals."""

    def score(point: Point) -> tuple[float, float]:
        energy, time = point.energy_to_solution_kJ, point.time_to_solution_s
        if objective == "least-time":
            return time, energy
        first = {
            "least-energy": energy,
            "least-edp": energy * time,
            "least-cost": constraints.cost(point),
            "least-carbon": energy,
        }[objective]
        return first, time

    return score


def _knee_of(points: Sequence[Point]) -> Point:
    return points[knee([(p.energy_to_solution_kJ, p.time_to_solution_s) for p in points])]


def _price_text(point: Point, objective: str, constraints: Constraints) -> str:
    """What the objective comes to, where it is no energy or time."""
    if objective == "least-cost":
        return f", and costs {number(constraints.cost(point))} at the prices given"
    if objective == "least-carbon":
        return f", and emits {number(constraints.carbon_g(point))} g of CO2"
    return ""


def front_of(points: Sequence[Point]) -> tuple[Point, ...]:
    """The non-dominated of them, fastest first."""
    energy = np.array([point.energy_to_solution_kJ for point in points], dtype=float)
    time = np.array([point.time_to_solution_s for point in points], dtype=float)
    kept = [point for point, on in zip(points, nondominated(energy, time), strict=True) if on]
    return tuple(sorted(kept, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ)))


def decide(
    points: Sequence[Point], front: Sequence[Point], constraints: Constraints
) -> tuple[Point | None, Choice]:
    """Choose among measured points.

    Args:
        points: every measured point. All of them are candidates, because under a power cap the
            best that fits may be dominated by one that does not.
        front: the non-dominated of them, fastest first; the knee is taken here.
        constraints: what was asked.

    Returns:
        The choice (None where nothing was measured) and how it was made.
    """
    asked = constraints.asked
    objective = constraints.objective or _usual(asked)
    rule = " + ".join([*asked, *([constraints.objective] if constraints.objective else [])])
    rule = rule or "knee"
    if not points or not front:
        return None, Choice(rule, False, "Nothing was measured, so there is nothing to choose.")
    units = Units.for_values(
        (p.energy_to_solution_kJ for p in points), (p.time_to_solution_s for p in points)
    )

    def needs(point: Point) -> str:
        energy = units.energy_text(point.energy_to_solution_kJ) + label(point.meter.estimated)
        return (
            f"{' '.join(knobs(point.configuration))} needs {energy} and "
            f"{units.time_text(point.time_to_solution_s)} at "
            f"{number(point.power_W)} W{label(point.meter.estimated)}"
            + _price_text(point, objective, constraints)
        )

    def choice(best: Point, met: bool, sentence: str) -> tuple[Point, Choice]:
        probabilities, every = _probabilities(best, constraints)
        if asked and met:
            sentence += f" It meets {'this' if len(asked) == 1 else 'all of it'} with a "
            sentence += f"probability of {percent(every)}."
        return best, Choice(
            rule,
            met,
            sentence,
            objective=objective,
            p_met=probabilities,
            p_all_met=every if asked else None,
            objective_value=_value(best, objective, constraints),
        )

    if not asked and constraints.objective is None:
        best = _knee_of(front)
        return choice(
            best, True, f"Nothing was asked, so the knee of the front is chosen: {needs(best)}."
        )
    fits = [point for point in points if _worst(point, constraints) <= 0]
    if not fits:
        best = min(points, key=lambda point: (_worst(point, constraints), point.time_to_solution_s))
        beyond = _worst(best, constraints)
        by = ""
        if math.isfinite(beyond):  # "22,000 % beyond" is no figure that people use
            many = beyond >= MANY_TIMES - 1
            worst = " at worst" if len(asked) > 1 else ""
            by = (
                f"{worst} {number(1 + beyond)} times"
                if many
                else f"{worst} {percent(beyond)} beyond"
            )
            by = "," + by
            by += " what was asked" if many else " it"
        return choice(
            best,
            False,
            f"No measured configuration trains {_phrase(asked, units)}; the nearest: "
            f"{needs(best)}{by}. {_instead(points, constraints, units)}",
        )
    best = _knee_of(fits) if objective == "knee" else min(fits, key=_score(objective, constraints))
    words = [_GOALS[objective], *([_phrase(asked, units)] if asked else [])]
    return choice(best, True, f"{' '.join(words)}: {needs(best)}.")


def _usual(asked: Mapping[str, float]) -> str:
    """The objective where none was named.

    The deadline alone (with or without a cap) asks for joules; every other wish asks for speed.
    """
    if not asked:
        return "knee"
    return "least-energy" if "deadline_s" in asked and "budget_kJ" not in asked else "least-time"


def _value(point: Point, objective: str, constraints: Constraints) -> float | None:
    """What the objective comes to: kJ, s, kJ s, money or grams; None for the knee."""
    if objective == "least-carbon":
        return constraints.carbon_g(point)
    return None if objective == "knee" else _score(objective, constraints)(point)[0]
