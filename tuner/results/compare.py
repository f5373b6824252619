"""Comparison of two measured points of a result, by the posterior of all launches."""

from __future__ import annotations

from dataclasses import replace

from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.results.significance import Comparison
from tuner.search_spaces.errors import InputError


def compare_points(result: Result, a: Point, b: Point) -> Comparison:
    """Compare step time and energy of `b` with `a`.

    Raises:
        InputError: they are one configuration, one was not measured, or they charge different
            scopes of energy.
    """
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
    basis = (
        f"By the posterior of all launches of the study, {launches[0]} and {launches[1]} of them "
        "of these two; it allows for the luck of a configuration that the search selected."
    )
    return Comparison(*names, time, energy, b.meter, basis)
