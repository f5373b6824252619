"""Plot of energy against time to solution in plain characters, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.formatting import Units
from tuner.results.parts import Point


def ascii_plot(
    marks: Sequence[tuple[Point, str]],
    span: Sequence[Point],
    units: Units,
    *,
    width: int,
    height: int,
) -> list[str]:
    """Return the lines of the plot.

    Args:
        marks: points and their characters; later ones are drawn over earlier ones.
        span: the points that the axes span; marks beyond them are not drawn.
    """
    x = [math.log(point.time_to_solution_s) for point in span]
    y = [math.log(point.energy_to_solution_kJ) for point in span]
    span_x, span_y = max(x) - min(x) or 1.0, max(y) - min(y) or 1.0
    grid = [[" "] * width for _ in range(height)]
    for point, mark in marks:
        column = (math.log(point.time_to_solution_s) - min(x)) / span_x * (width - 1)
        row = (max(y) - math.log(point.energy_to_solution_kJ)) / span_y * (height - 1)
        if -0.5 <= column < width - 0.5 and -0.5 <= row < height - 0.5:
            grid[round(row)][round(column)] = mark
    top, bottom = (units.energy_text(math.exp(end)) for end in (max(y), min(y)))
    left, right = (units.time_text(math.exp(end)) for end in (min(x), max(x)))
    side = max(len(top), len(bottom))
    sides = [top, *[""] * (height - 2), bottom]
    return [
        *(f"{sides[i]:>{side}} |{''.join(row).rstrip()}" for i, row in enumerate(grid)),
        f"{'':>{side}} +{'-' * width}",
        f"{'':>{side}}  {left}{right:>{width - len(left)}}",
    ]
