"""The power curve of a job as CSV and as a figure; its table is in `tuner.display.online_text`."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tuner.display.export import csv_text
from tuner.display.figures.style import BLUE, ORANGE, empty_figure, scatter_trace
from tuner.formatting import Units, after_comma
from tuner.online.curve import Curve

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Columns of the CSV: fields of a point's JSON.
COLUMNS = (
    *("power_W", "peak_power_W", "time_to_solution_s", "energy_to_solution_kJ", "slowdown"),
    *("live", "restart_s", "restart_kJ", "for_average", "for_peak", "short_name"),
)


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
