"""The front as a Plotly figure: energy against time, with everything that decides on it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.display.figures.style import (
    BLUE,
    FAINT,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    Axis,
    add_small_text,
    empty_figure,
    line_trace,
    points_trace,
    translucent,
)
from tuner.display.text import energy_mark, role, units_of
from tuner.formatting import Units, after_comma, number
from tuner.results.parts import Attainment, Point
from tuner.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Characters of a line below the axis on a phone.
_NARROW = 36


def front_figure(result: Result, *, chosen: str = "") -> go.Figure | None:
    """Energy against time: the points, the front as the staircase that it attains, the baseline,
    the choice, 90 % intervals, the band in which the true front lies, points that are only
    predicted, and the constraints. None where nothing was measured."""
    every = {p.configuration: p for p in (*result.points, *result.front_points)}
    for point in (result.baseline, result.best):
        if point is not None:
            every.setdefault(point.configuration, point)
    if not every:
        return None
    units = units_of(result)
    every |= {p.configuration: p for p in result.predicted if p.configuration not in every}
    on_front = {p.configuration for p in result.front_points}
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    dominated = [p for c, p in every.items() if c not in on_front and p.windows]
    predicted = [p for c, p in every.items() if c not in on_front and not p.windows]
    shown = [p for p in (*front, result.best, result.baseline) if p]
    limit_kJ, limit_s = result.constraints.get("budget_kJ"), result.constraints.get("deadline_s")
    band = result.attainment or Attainment((), (), (), (), 0)
    near = _near(shown, [*dominated, *predicted])
    x_axis = Axis(
        (p.time_to_solution_s / units.s for p in near),
        [t / units.s for p in shown for t in p.time_interval_s]
        + ([limit_s / units.s] if limit_s else []),
    )
    y_axis = Axis(
        (p.energy_to_solution_kJ / units.kJ for p in near),
        [e / units.kJ for p in shown for e in p.energy_interval_kJ]
        + ([limit_kJ / units.kJ] if limit_kJ else [])
        + [e / units.kJ for e in (*band.energy_kJ_10, *band.energy_kJ_90)],
    )
    figure = empty_figure(
        f"Time to solution ({units.time})",
        f"Energy to solution ({units.energy}{after_comma(energy_mark(result))})",
        x_axis.layout(),
        y_axis.layout(),
    )
    _add_band(figure, result, units, x_axis)
    if dominated:
        marker = {"color": FAINT, "size": 6, "opacity": 0.55}
        figure.add_trace(points_trace(dominated, "dominated", "Dominated", units, marker, False))
    if predicted:
        # Of an open symbol the marker's own colour draws the edge.
        marker = {"color": PURPLE, "size": 8, "symbol": "circle-open", "line": {"width": 1.5}}
        figure.add_trace(points_trace(predicted, "predicted", "Predicted", units, marker, False))
    if len(front) > 1:
        stairs = {"shape": "hv", "color": BLUE, "width": 1.5}
        x = [p.time_to_solution_s / units.s for p in front]
        y = [p.energy_to_solution_kJ / units.kJ for p in front]
        figure.add_trace(line_trace(x, y, stairs))
    for source, name, symbol in (
        ("measured", "front", "circle"),
        ("predicted", "front, predicted", "circle-open"),
    ):
        some = [p for p in front if p.source == source]
        if some:
            marker = {"color": BLUE, "size": 9, "symbol": symbol}
            figure.add_trace(points_trace(some, name, "On the front", units, marker))
    if result.baseline is not None:
        marker = {"color": ORANGE, "size": 11, "symbol": "diamond"}
        figure.add_trace(points_trace([result.baseline], "baseline", "Baseline", units, marker))
    if result.best is not None:
        marker = {
            "color": "rgba(0,0,0,0)",
            "size": 19,
            "symbol": "circle",
            "line": {"width": 2.5, "color": GREEN},
        }
        word = chosen or role(result, result.best) or "chosen"
        trace = points_trace([result.best], word, word.capitalize(), units, marker, False)
        figure.add_trace(trace)
    outside = _add_constraints(figure, result, units, x_axis, y_axis)
    if far := len(every) - len({p.configuration for p in near}):
        outside.append(f"{far} dominated point{'s' * (far != 1)}")
    if outside:  # below the axis, where no label of a line or a point can be
        lines = textwrap.wrap("outside this view: " + ", ".join(outside), _NARROW)
        title = figure.layout.xaxis.title
        title.text += "".join(f'<br><span style="color:{MUTED}">{line}</span>' for line in lines)
    return figure


def _near(shown: Sequence[Point], others: Sequence[Point]) -> list[Point]:
    """Return the points to fit the view to.

    These are front, choice and baseline, and the others within twice their span beyond them, so
    that one slow point does not squeeze the rest.
    """
    if not shown:
        return list(others)

    def reach(values: Sequence[float]) -> float:
        return max(values) + 2 * max(max(values) - min(values), 0.2 * max(values))

    time = reach([p.time_to_solution_s for p in shown])
    energy = reach([p.energy_to_solution_kJ for p in shown])
    near = [p for p in others if p.time_to_solution_s <= time and p.energy_to_solution_kJ <= energy]
    return [*shown, *near]


def _add_band(figure: go.Figure, result: Result, units: Units, x_axis: Axis) -> None:
    """Draw the band of the true front: between its 10 % and 90 % attainment surfaces."""
    band = result.attainment
    if band is None or len(band.time_s) < 2:
        return
    columns = (band.time_s, band.energy_kJ_10, band.energy_kJ_50, band.energy_kJ_90)
    known = [
        [time_s / units.s, *(energy / units.kJ for energy in energies)]
        for time_s, *energies in zip(*columns, strict=True)
        if all(math.isfinite(v) for v in energies) and time_s / units.s <= x_axis.high
    ]
    if len(known) < 2:
        return
    times, low, middle, high = (
        [round(v, 6) for v in column] for column in zip(*known, strict=True)
    )
    edge = {"shape": "hv", "width": 0, "color": BLUE}
    figure.add_trace(line_trace(times, high, edge))
    band_trace = line_trace(times, low, edge, name="80 % band of the true front")
    figure.add_trace({**band_trace, "fill": "tonexty", "fillcolor": translucent(BLUE)})
    dotted = {"shape": "hv", "width": 1, "color": BLUE, "dash": "dot"}
    figure.add_trace(line_trace(times, middle, dotted, name="median of the true front"))


def _add_constraints(
    figure: go.Figure, result: Result, units: Units, x_axis: Axis, y_axis: Axis
) -> list[str]:
    """Draw lines of what was asked, each with its label; return those outside the view."""
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    outside: list[str] = []

    def limit(text: str, value: float, axis: Axis, along: str, across: str, **label: Any) -> None:
        """Draw a line at `value` of the axis `along` across the other axis, labelled at its end."""
        if not axis.holds(value):
            outside.append(text)
            return
        whole = {f"{across}ref": f"{across} domain"}
        figure.add_shape(
            type="line",
            line=line,
            **whole,
            **{f"{across}0": 0, f"{across}1": 1, f"{along}ref": along},
            **{f"{along}0": value, f"{along}1": value},
        )
        at = {"xanchor": "right", across: 1, f"{along}ref": along, along: axis.at(value)}
        add_small_text(figure, text, {**whole, **at, **label}, 12)

    if budget := result.constraints.get("budget_kJ"):
        text = f"budget {units.energy_text(budget)}"
        limit(text, budget / units.kJ, y_axis, "y", "x", yanchor="bottom")
    if deadline := result.constraints.get("deadline_s"):
        text = f"deadline {units.time_text(deadline)}"
        # At the top, but where the budget's label is, in the upper right: then at the bottom.
        level, at = (budget / units.kJ if budget else y_axis.low), deadline / units.s
        taken = y_axis.holds(level) and y_axis.share(level) > 0.5 and x_axis.share(at) > 0.5
        end = {"y": 0, "yanchor": "bottom"} if taken else {"y": 1, "yanchor": "top"}
        limit(text, at, x_axis, "x", "y", textangle=-90, **end)
    cap = result.constraints.get("power_cap_W")
    if cap:
        # Average power is energy over time, so a cap is a line through the origin: E = cap x t.
        text = f"power cap {number(cap)} W"
        times = [x_axis.low + (x_axis.high - x_axis.low) * i / 60 for i in range(61)]
        energies = [cap * t * units.s / 1000 / units.kJ for t in times]
        if any(y_axis.holds(e) for e in energies):
            figure.add_trace(line_trace(times, energies, {**line, "dash": "dot"}, name=text))
        else:
            outside.append(text)
    return outside
