"""The power curve of a job as a table, CSV and figure."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tuner.display.export import csv_text
from tuner.display.figures.style import BLUE, ORANGE, empty_figure, scatter_trace
from tuner.formatting import Units, after_comma, duration, energy_text, label, number, percent
from tuner.online.curve import Curve, CurvePoint

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Columns of the CSV: fields of a point's JSON.
COLUMNS = (
    *("power_W", "peak_power_W", "time_to_solution_s", "energy_to_solution_kJ", "slowdown"),
    *("live", "restart_s", "restart_kJ", "for_average", "for_peak", "short_name"),
)


def _move(each: CurvePoint) -> str:
    if each.live:
        return "live"
    if each.restart_s is None or each.restart_kJ is None:
        return "restart, cost unknown"
    return f"restart, {duration(each.restart_s)}, {energy_text(each.restart_kJ)}"


def curve_rows(curve: Curve) -> list[tuple[str, ...]]:
    """Return the table, its heading first, by falling power."""
    units = Units.of(each.point for each in curve.points)
    rows: list[tuple[str, ...]] = [
        (
            *("average W", "peak W", f"time ({units.time})", f"energy ({units.energy})"),
            *("slowdown [90 %]", "move", "configuration"),
        )
    ]
    for each in curve.points:
        point = each.point
        peak = "-" if point.peak_power_W is None else number(point.peak_power_W)
        slowdown = percent(each.slowdown)
        if each.slowdown_interval is not None:
            slowdown += f" [{', '.join(percent(end) for end in each.slowdown_interval)}]"
        rows.append(
            (
                number(point.power_W) + ("" if each.for_average else " *"),
                peak,
                number(point.time_to_solution_s / units.s),
                number(point.energy_to_solution_kJ / units.kJ),
                "start" if point is curve.start else slowdown,
                _move(each),
                point.configuration.short,
            )
        )
    return rows


def curve_notes(curve: Curve) -> list[str]:
    """Return what a reader of the table must know."""
    lines = [f"Power of the {curve.start.meter.scope} scope{label(curve.start.meter.mark)}."]
    if any(each.point.source == "predicted" for each in curve.points):
        lines.append("These figures are predicted; nothing was measured.")
    if any(not each.live for each in curve.points):
        lines.append(
            "A restart takes as long as the run's launches, and repeats the steps since the last "
            "checkpoint."
        )
    if any(not each.for_average for each in curve.points):
        lines.append("* A faster point draws less on average.")
    if all(each.point.peak_power_W is None for each in curve.points):
        lines.append("The run kept no power samples, so no peak is known.")
    return lines


def curve_csv(curve: Curve) -> str:
    """Return the curve as CSV."""
    values = (each.to_json() for each in curve.points)
    return csv_text(COLUMNS, ([row[name] for name in COLUMNS] for row in values))


def curve_figure(curve: Curve) -> go.Figure:
    """Draw the least time within each average power: by live moves, and with restarts."""
    units = Units.of(each.point for each in curve.points)
    mark = after_comma(curve.start.meter.mark)
    figure = empty_figure(
        f"Average power (W{mark})", f"Time to solution ({units.time})", {}, {"rangemode": "tozero"}
    )
    for live, name, colour in ((True, "live", BLUE), (False, "after a restart", ORANGE)):
        shown = [each for each in curve.points if each.live is live and each.for_average]
        if shown:
            watts = [each.point.power_W for each in shown]
            times = [each.point.time_to_solution_s / units.s for each in shown]
            hover = [html.escape(each.point.configuration.short) for each in shown]
            line = {"color": colour, "shape": "vh"}
            trace = scatter_trace(watts, times, name=name, hover=hover, line=line)
            figure.add_trace({**trace, "mode": "lines+markers"})
    return figure
