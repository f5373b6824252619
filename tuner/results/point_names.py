"""Measured points by name ("today", a number of the front, the knobs in any spelling), compared."""

from __future__ import annotations

from dataclasses import replace

from tuner.pareto import knee
from tuner.problem.configuration_names import named_configurations
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.results.significance import Comparison
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName


def find_point(result: Result, name: str | Configuration) -> Point:
    """Return a measured point by name (`Result.point`)."""
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


def compare_points(result: Result, a: Point, b: Point) -> Comparison:
    """Compare step time and energy of `b` with `a` (`Result.compare`)."""
    names = a.configuration.short, b.configuration.short
    for point, name in zip((a, b), names, strict=True):
        if not result.windows.get(point.configuration):
            raise InputError(f"{name} has no measurement to compare")
    if a.meter.scope != b.meter.scope:
        raise InputError(
            f"{names[0]} charges the {a.meter.scope} and {names[1]} the {b.meter.scope}; "
            "energies of two scopes cannot be compared"
        )
    found = replace(result.judged, baseline=a).differences(b)
    if found is None:
        raise InputError(f"{names[0]} and {names[1]} are the same configuration; name two")
    energy, time = found
    launches = [len(set(result.launches.get(each.configuration, ()))) for each in (a, b)]
    if b.meter.is_simulated:
        return Comparison(*names, time, energy, b.meter)
    basis = (
        f"By the posterior of all launches of the study, {launches[0]} and {launches[1]} of them "
        "of these two; it allows for the luck of a configuration that the search selected."
    )
    return Comparison(*names, time, energy, b.meter, basis)
