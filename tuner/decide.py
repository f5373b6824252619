"""The choice: one measured configuration under what the user asked of the training job.

Constraints choose on the front, they do not cut it. `budget_kJ` asks for the fastest configuration
whose energy-to-solution fits, `deadline_s` for the least energy in time, `power_cap_W` bounds the
job's average power; several hold together, and with none the knee is taken. Where nothing
measured can meet what was asked, the nearest point is returned and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.pareto import knee
from tuner.result import Choice, Point
from tuner.settings import check_positive
from tuner.wording import Units, knobs, label, number

__all__ = ["Constraints", "decide"]


@dataclass(frozen=True)
class Constraints:
    """What the user asks of the training job.

    Attributes:
        budget_kJ: energy the whole job may use, in the meter's scope.
        deadline_s: time the whole job may take.
        power_cap_W: the job's average power may not exceed this.

    Raises:
        InvalidValue: one of them is not a number greater than 0.
    """

    budget_kJ: float | None = None
    deadline_s: float | None = None
    power_cap_W: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_positive(name, getattr(self, name))

    @property
    def asked(self) -> dict[str, float]:
        """Those that were given, by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: float(value) for name, value in values.items() if value is not None}

    def excess(self, energy_kJ: float, time_s: float, power_W: float) -> dict[str, float]:
        """By how much each is exceeded, as a share of it; 0 or less where it is kept."""
        values = {"budget_kJ": energy_kJ, "deadline_s": time_s, "power_cap_W": power_W}
        return {name: values[name] / limit - 1 for name, limit in self.asked.items()}


def _worst(point: Point, constraints: Constraints) -> float:
    return max(
        constraints.excess(
            point.energy_to_solution_kJ, point.time_to_solution_s, point.power_W
        ).values()
    )


def _phrase(asked: Mapping[str, float], units: Units) -> str:
    words = {
        "budget_kJ": lambda value: f"within {units.energy_text(value)}",
        "deadline_s": lambda value: f"within {units.time_text(value)}",
        "power_cap_W": lambda value: f"at no more than {number(value)} W on average",
    }
    return " and ".join(words[name](value) for name, value in asked.items())


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
    rule = " + ".join(asked) or "knee"
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
        )

    if not asked:
        best = front[knee([(p.energy_to_solution_kJ, p.time_to_solution_s) for p in front])]
        return best, Choice(
            rule, True, f"Nothing was asked, so the knee of the front is chosen: {needs(best)}."
        )
    fits = [point for point in points if _worst(point, constraints) <= 0]
    if not fits:
        best = min(points, key=lambda point: (_worst(point, constraints), point.time_to_solution_s))
        return best, Choice(
            rule,
            False,
            f"No measured configuration trains {_phrase(asked, units)}; the nearest: "
            f"{needs(best)}, {100 * _worst(best, constraints):.3g} % beyond.",
        )
    # The deadline alone (with or without a cap) asks for joules; every other wish asks for speed.
    least_energy = "deadline_s" in asked and "budget_kJ" not in asked
    if least_energy:
        best = min(fits, key=lambda p: (p.energy_to_solution_kJ, p.time_to_solution_s))
    else:
        best = min(fits, key=lambda p: (p.time_to_solution_s, p.energy_to_solution_kJ))
    what = "Least energy" if least_energy else "Fastest"
    return best, Choice(rule, True, f"{what} {_phrase(asked, units)}: {needs(best)}.")
