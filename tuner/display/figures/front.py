"""Fronts as Plotly figures: energy against time, with everything that decides on it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.answer.answer import Answer
from tuner.answer.parts import Attainment, Point
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
    points_trace,
    scatter_trace,
    translucent,
)
from tuner.display.view import View
from tuner.formatting import Units, after_comma, number

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Characters of a line below the axis on a phone.
_NARROW = 36


def front_figure(result: Answer) -> go.Figure | None:
    """Return energy against time: today, the recommendation, the front and the limits.

    Dominated and predicted points and the band in which the true front lies are in the legend
    alone until they are asked for. None where nothing was measured.
    """
    every = {p.configuration: p for p in (*result.points, *result.front_points)}
    advice = result.recommendation
    named = [p for p in (advice.point, advice.promising) if p is not None] if advice else []
    for point in (result.baseline, *named):
        if point is not None:
            every.setdefault(point.configuration, point)
    if not every:
        return None
    view = View(result)
    units = view.units
    every |= {p.configuration: p for p in result.predicted if p.configuration not in every}
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown = [p for p in (*front, *named, result.baseline) if p]
    x_axis, y_axis = _axes(result, units, shown, shown or list(every.values()))
    figure = empty_figure(
        f"Time to solution ({units.time})",
        f"Energy to solution ({units.energy}{after_comma(view.mark)})",
        x_axis.layout(),
        y_axis.layout(),
    )
    _add_band(figure, result, units, x_axis)
    _add_hidden_points(
        figure, view, [p for c, p in every.items() if c not in view.front], x_axis, y_axis
    )
    _add_front(figure, view, front)
    for point in result.compared:
        marker = {"color": ORANGE, "size": 11, "symbol": "diamond"}
        figure.add_trace(points_trace(view, [point], "today", "Today", marker))
    for point in named:
        word = view.role(point)
        ring = {"width": 2.5, "color": GREEN if word == "recommended" else PURPLE}
        marker = {"color": "rgba(0,0,0,0)", "size": 19, "symbol": "circle", "line": ring}
        trace = points_trace(view, [point], word, word.capitalize(), marker, False)
        figure.add_trace(trace)
    _add_percent_of_today(figure, result, units, x_axis, y_axis)
    figure.update_layout(legend=_legend_corner(shown, units, x_axis, y_axis))
    outside = _add_constraints(figure, result, units, x_axis, y_axis)
    if outside:  # below the axis, where no label of a line or a point can be
        lines = textwrap.wrap("outside this view: " + ", ".join(outside), _NARROW)
        title = figure.layout.xaxis.title
        title.text += "".join(f'<br><span style="color:{MUTED}">{line}</span>' for line in lines)
    return figure


def _axes(
    result: Answer, units: Units, shown: Sequence[Point], inside: Sequence[Point]
) -> tuple[Axis, Axis]:
    # Axes that hold all points inside, and the intervals of the points shown, limits and the band
    # as far as they are near.
    limit_kJ, limit_s = result.limits.budget_kJ, result.limits.deadline_s
    band = result.attainment or Attainment((), (), (), (), 0)
    times_s = [t for p in shown for t in p.time_interval_s]
    energies_kJ = [e for p in shown for e in p.energy_interval_kJ]
    times_s += [limit_s] if limit_s else []
    energies_kJ += [limit_kJ] if limit_kJ else []
    energies_kJ += [*band.energy_kJ_10, *band.energy_kJ_90]
    return (
        Axis((units.place(p)[0] for p in inside), [t / units.s for t in times_s]),
        Axis((units.place(p)[1] for p in inside), [e / units.kJ for e in energies_kJ]),
    )


def _add_hidden_points(
    figure: go.Figure, view: View, points: Sequence[Point], x_axis: Axis, y_axis: Axis
) -> None:
    # Points that are not on the front, in the legend alone until they are asked for.
    dominated = [point for point in points if point.windows]
    predicted = [point for point in points if not point.windows]
    if dominated:
        marker = {"color": FAINT, "size": 6, "opacity": 0.55}
        places = map(view.units.place, dominated)
        far = sum(not (x_axis.holds(time) and y_axis.holds(energy)) for time, energy in places)
        name = "dominated points" + (f" ({far} of them outside this view)" if far else "")
        trace = points_trace(view, dominated, name, "Dominated", marker, False)
        figure.add_trace({**trace, "visible": "legendonly"})
    if predicted:
        # Of an open symbol the marker's own colour draws the edge.
        marker = {"color": PURPLE, "size": 8, "symbol": "circle-open", "line": {"width": 1.5}}
        trace = points_trace(view, predicted, "points never tried", "Predicted", marker, False)
        figure.add_trace({**trace, "visible": "legendonly"})


def _add_front(figure: go.Figure, view: View, front: Sequence[Point]) -> None:
    if len(front) > 1:
        stairs = {"shape": "hv", "color": BLUE, "width": 1.5}
        x, y = (list(values) for values in zip(*map(view.units.place, front), strict=True))
        figure.add_trace(scatter_trace(x, y, line=stairs))
    kinds = (("measured", "front", "circle"), ("predicted", "front, predicted", "circle-open"))
    for source, name, symbol in kinds:
        some = [p for p in front if p.source == source]
        if some:
            marker = {"color": BLUE, "size": 9, "symbol": symbol}
            figure.add_trace(points_trace(view, some, name, "On the front", marker))


def _add_band(figure: go.Figure, result: Answer, units: Units, x_axis: Axis) -> None:
    # The band of the true front is between its 10 % and 90 % attainment surfaces.
    band = result.attainment
    if band is None or len(band.time_s) < 2 or len(result.front_points) < 3:
        return
    columns = (band.time_s, band.energy_kJ_10, band.energy_kJ_50, band.energy_kJ_90)
    costed = [
        [time_s / units.s, *(energy / units.kJ for energy in energies)]
        for time_s, *energies in zip(*columns, strict=True)
        if all(math.isfinite(v) for v in energies) and time_s / units.s <= x_axis.high
    ]
    if len(costed) < 2:
        return
    times, low, middle, high = (
        [round(v, 6) for v in column] for column in zip(*costed, strict=True)
    )
    edge = {"shape": "hv", "width": 0, "color": BLUE}
    hidden = {"visible": "legendonly"}
    figure.add_trace(scatter_trace(times, high, line=edge, **hidden))
    fill = {"fill": "tonexty", "fillcolor": translucent(BLUE)}
    name = "80 % band of the true front"
    figure.add_trace(scatter_trace(times, low, name=name, line=edge, **fill, **hidden))
    dotted = {"shape": "hv", "width": 1, "color": BLUE, "dash": "dot"}
    figure.add_trace(scatter_trace(times, middle, name="its median", line=dotted, **hidden))


def _add_percent_of_today(
    figure: go.Figure, result: Answer, units: Units, x_axis: Axis, y_axis: Axis
) -> None:
    # Axes at the top and the right tell the change against today in per cent.
    today = result.baseline
    if today is None:
        return
    time, energy = units.place(today)
    for along, axis, value, side in (("x", x_axis, time, "top"), ("y", y_axis, energy, "right")):
        if axis.log or not value > 0:
            return
        layout = {
            **{"overlaying": along, "side": side, "anchor": "y2" if along == "x" else "x2"},
            "range": [100 * (end / value - 1) for end in (axis.low, axis.high)],
            **{"tickformat": "+.3~g", "ticksuffix": " %", "tickmode": "auto", "nticks": 6},
            **{"tickfont": {"color": MUTED, "size": 11}, "showgrid": False, "zeroline": False},
            "automargin": True,
        }
        figure.update_layout({f"{along}axis2": layout})
    # An axis is drawn where a trace is on it.
    empty = {"x": [None], "y": [None], "xaxis": "x2", "yaxis": "y2", "showlegend": False}
    figure.add_trace({"type": "scatter", "hoverinfo": "skip", **empty})


def _legend_corner(
    shown: Sequence[Point], units: Units, x_axis: Axis, y_axis: Axis
) -> dict[str, Any]:
    # The corner with the fewest points: mostly next to the origin, as nothing dominates the front.
    drawn = map(units.place, shown)
    places = [(x_axis.share(time), y_axis.share(energy)) for time, energy in drawn]

    def crowd(corner: tuple[int, int]) -> int:
        return sum(abs(x - corner[0]) < 0.45 and abs(y - corner[1]) < 0.4 for x, y in places)

    x, y = min(((0, 0), (1, 1), (0, 1), (1, 0)), key=crowd)
    return {
        "orientation": "v",
        "x": x,
        "xanchor": ("left", "right")[x],
        "y": y,
        "yanchor": ("bottom", "top")[y],
        "bgcolor": "rgba(0,0,0,0)",
    }


def _add_constraints(
    figure: go.Figure, result: Answer, units: Units, x_axis: Axis, y_axis: Axis
) -> list[str]:
    # Lines of what was asked, each with its label; those outside the view are returned.
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    outside: list[str] = []

    def limit(text: str, value: float, axis: Axis, along: str, across: str, **label: Any) -> None:
        # A line at the value of the axis `along` across the other axis, labelled at its end.
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

    if budget := result.limits.budget_kJ:
        text = f"budget {units.energy_text(budget)}"
        limit(text, budget / units.kJ, y_axis, "y", "x", yanchor="bottom")
    if deadline := result.limits.deadline_s:
        text = f"deadline {units.time_text(deadline)}"
        # At the top, but where the budget's label is, in the upper right: then at the bottom.
        level, at = (budget / units.kJ if budget else y_axis.low), deadline / units.s
        taken = y_axis.holds(level) and y_axis.share(level) > 0.5 and x_axis.share(at) > 0.5
        end = {"y": 0, "yanchor": "bottom"} if taken else {"y": 1, "yanchor": "top"}
        limit(text, at, x_axis, "x", "y", textangle=-90, **end)
    if cap := result.limits.power_cap_W:
        # Average power is energy over time, so a cap is a line through the origin: E = cap x t.
        text = f"power cap {number(cap)} W"
        times = [x_axis.low + (x_axis.high - x_axis.low) * i / 60 for i in range(61)]
        energies = [cap * t * units.s / 1000 / units.kJ for t in times]
        if any(y_axis.holds(e) for e in energies):
            dotted = {**line, "dash": "dot"}
            figure.add_trace(scatter_trace(times, energies, name=text, line=dotted))
        else:
            outside.append(text)
    return outside
