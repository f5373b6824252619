"""Names of measured points: "today", a number of the front, or the knobs in any spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.pareto import knee
from tuner.problem.configuration_names import named_configurations
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName

if TYPE_CHECKING:
    from tuner.results.parts import Point
    from tuner.results.result import Result


def find_point(result: Result, name: str | Configuration) -> Point:
    """Return a measured point by name (`Result.point`).

    Raises:
        UnknownName: there is none.
        InputError: knobs that name several points.
    """
    named = {
        "recommended": result.recommended,
        "best": result.best,
        "today": result.baseline,
        "baseline": result.baseline,  # of the release before
    }
    if result.front_points:
        both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in result.front_points]
        named["knee"] = result.front_points[knee(both)]
    named |= {str(number): p for number, p in enumerate(result.front_points, start=1)}
    if isinstance(name, Configuration):
        found = [point for point in result.points if point.configuration == name]
    elif (direct := named.get(name)) is not None:
        return direct
    else:
        configurations = [point.configuration for point in result.points]
        right = named_configurations(configurations, name, "measured points")
        found = [point for point in result.points if point.configuration in right]
    if found:
        return found[0]
    known = [word for word in ("recommended", "today", "best", "knee") if named.get(word)]
    known += [f"1 to {len(result.front_points)}"] if result.front_points else []
    raise UnknownName(
        "measured point",
        name.short if isinstance(name, Configuration) else name,
        [*known, f"or a configuration that was measured (tuner show {result.name})"],
    )
