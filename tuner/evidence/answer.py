"""Answer of a run as plain figures, to be compared with the answer computed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tuner.results.result import Result

__all__ = ["TOLERANCE", "answer_of", "differences"]

#: Largest relative difference of a figure that another machine may compute from the same trace:
#: the points' figures are posterior means, whose fit ends at a tolerance of its own.
TOLERANCE = 1e-3


def answer_of(result: Result) -> dict[str, Any]:
    """Return what a run answers: its advice, its verification and every point's figures."""
    advice = result.recommendation
    verification = result.verification
    return {
        "recommendation": advice.action if advice else None,
        "basis": advice.basis if advice else None,
        "recommended": advice.point.configuration.key if advice else None,
        "choice": result.best.configuration.key if result.best else None,
        "verification": verification.status if verification else None,
        "probes": result.spent.probes,
        "spent_kJ": result.spent.energy_kJ,
        "points": {
            point.configuration.key: [point.time_to_solution_s, point.energy_to_solution_kJ]
            for point in result.points
        },
    }


def differences(stated: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[list[str], float]:
    """Compare two answers.

    Args:
        stated: the answer in a bundle.
        found: the answer computed here from the bundle's trace.

    Returns:
        A sentence for each difference, and the largest relative difference of a figure.
    """
    said = [
        f"{name} is {found[name]!r} here, and {stated.get(name)!r} in the bundle"
        for name in ("recommendation", "basis", "recommended", "choice", "verification", "probes")
        if stated.get(name) != found[name]
    ]
    points = stated.get("points")
    pairs: list[tuple[str, Any, float]] = [("spent_kJ", stated.get("spent_kJ"), found["spent_kJ"])]
    if not isinstance(points, Mapping) or set(points) != set(found["points"]):
        said.append("the measured configurations are others than in the bundle")
        points = {}
    for key, figures in points.items():
        here = found["points"][key]
        if not isinstance(figures, list) or len(figures) != len(here):
            said.append(f"{key} has no time and energy in the bundle")
            continue
        named = zip(("time", "energy"), figures, here, strict=True)
        pairs += [(f"the {what} of {key}", old, new) for what, old, new in named]
    largest = 0.0
    for what, old, new in pairs:
        apart = _apart(old, new)
        largest = max(largest, apart)
        if apart > TOLERANCE:
            said.append(f"{what} is {new:.6g} here, and {old} in the bundle")
    return said, largest


def _apart(old: Any, new: float) -> float:
    if type(old) not in (int, float):
        return math.inf
    if old == new:
        return 0.0
    return abs(old - new) / max(abs(old), abs(new))
