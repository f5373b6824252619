"""Choices under a grid of deadlines and energy budgets, for a page that only looks them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.answer.another_choice import choose
from tuner.answer.answer import Answer
from tuner.answer.choice import best_of, figures_of, front_of
from tuner.answer.parts import Point
from tuner.formatting import Units
from tuner.problem.constraints import Constraints

#: Values of each limit, beside no limit and the run's own one.
VALUES = 24
#: The values reach this share beyond the least and the greatest figure of the front.
BEYOND = 0.05


@dataclass(frozen=True)
class ChoiceGrid:
    """Choice of `Result.choose` under each pair of a deadline and an energy budget.

    Attributes:
        deadlines_s: ascending; the last one is None, no deadline. `budgets_kJ` likewise.
        points: the points that are chosen in any cell.
        cells: for each deadline and each budget the number of a point, and True if it meets both.
    """

    deadlines_s: tuple[float | None, ...]
    budgets_kJ: tuple[float | None, ...]
    points: tuple[Point, ...]
    cells: tuple[tuple[tuple[int, bool], ...], ...]


def choice_grid(result: Answer, units: Units) -> ChoiceGrid | None:
    """Return the choices on a grid whose values have three digits in these units.

    None if there is only one point to choose, or the length of the training is unknown.
    """
    judge = result.judged
    front = front_of(judge.candidates)
    if len(front) < 2 or result.length is None:
        return None
    shown = [*front, *result.compared]
    own = result.limits
    deadlines_s = _values([p.estimated.time_to_solution_s for p in shown], units.s, own.deadline_s)
    budgets_kJ = _values(
        [p.estimated.energy_to_solution_kJ for p in shown], units.kJ, own.budget_kJ
    )
    points: list[Point] = []
    figures = figures_of(judge.candidates)

    def cell(deadline_s: float | None, budget_kJ: float | None) -> tuple[int, bool]:
        if deadline_s is None and budget_kJ is None:
            point, met = choose(result, Constraints()).point, True
        else:
            limits = Constraints(deadline_s=deadline_s, budget_kJ=budget_kJ)
            best = best_of(judge.candidates, limits, result.baseline, judge.chance, figures)
            point, met = best.point, best.met
        if point not in points:
            points.append(point)
        return points.index(point), met

    cells = tuple(tuple(cell(time, energy) for energy in budgets_kJ) for time in deadlines_s)
    return ChoiceGrid(deadlines_s, budgets_kJ, tuple(points), cells)


def _values(figures: Sequence[float], unit: float, own: float | None) -> tuple[float | None, ...]:
    # Even steps of the logarithm.
    low, high = (1 - BEYOND) * min(figures) / unit, (1 + BEYOND) * max(figures) / unit
    steps = [i / (VALUES - 1) for i in range(VALUES)]
    values = {unit * float(f"{low * math.pow(high / low, step):.3g}") for step in steps}
    return (*sorted(values | ({own} if own is not None else set())), None)
