"""Comparison of two measured points of a result, by the launches that tell most about them."""

from __future__ import annotations

from dataclasses import replace

from tuner.results.parts import Point
from tuner.results.recommendation import fresh_launches
from tuner.results.result import Result
from tuner.results.significance import Comparison, compare_measurements

__all__ = ["compare_points"]


def compare_points(result: Result, a: Point, b: Point) -> Comparison:
    """Compare step time and energy of `b` with `a`.

    If verification launched one of them in turn with the other, the baseline, its figures are
    returned: those launches did not select the configuration. Otherwise all launches of both are
    compared.

    Raises:
        InputError: one has no window, or they charge different scopes of energy.
    """
    names = a.configuration.short, b.configuration.short
    today = result.baseline.configuration if result.baseline is not None else None
    for baseline, tried in ((a, b), (b, a)):
        attempt = fresh_launches(result, tried)
        if attempt is None or baseline.configuration != today:
            continue
        time, energy = attempt.step_time, attempt.energy
        assert time is not None and energy is not None  # noqa: PT018
        if tried is a:
            time, energy = time.reversed, energy.reversed
        basis = f"By the verification: {attempt.pairs} fresh launches of each, in turn."
        return Comparison(*names, time, energy, tried.meter, basis)
    both = a.configuration, b.configuration
    first, second = (result.windows.get(each, ()) for each in both)
    # Windows of unknown launches count as one launch, which claims least.
    launches = [
        result.launches.get(each, (0,) * len(result.windows.get(each, ()))) for each in both
    ]
    found = compare_measurements(
        first, second, (launches[0], launches[1]), names=names, meters=(a.meter, b.meter)
    )
    basis = (
        "By every launch of both, the search's included: a configuration that the search selected "
        "looks better in them than it is."
    )
    return replace(found, basis=basis)
