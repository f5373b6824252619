"""The fronts of several numbers of GPUs in one Plotly figure, with the choice on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.display.figures.style import SERIES, SYMBOLS, TEXT, Axis, empty_figure
from tuner.formatting import Units
from tuner.results.choice import front_of
from tuner.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go


def sizes_figure(result: Result) -> go.Figure | None:
    """Energy against time: one front for each number of GPUs, the choices joined by a line.

    None if the result is of no plan over several sizes.
    """
    sizes = result.plan.sizes if result.plan is not None else ()
    if len(sizes) < 2:
        return None
    fronts = {
        size.gpus: front_of([p for p in result.points if p.configuration.world_size == size.gpus])
        for size in sizes
    }
    every = [point for front in fronts.values() for point in front]
    units = Units.of(every)
    x_axis = Axis([p.time_to_solution_s / units.s for p in every])
    y_axis = Axis([p.energy_to_solution_kJ / units.kJ for p in every])
    figure = empty_figure(
        f"Time to solution ({units.time}), predicted",
        f"Energy to solution ({units.energy}), predicted",
        x_axis.layout(),
        y_axis.layout(),
    )
    figure.add_trace(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "choices",
            "x": [size.best.time_to_solution_s / units.s for size in sizes],
            "y": [size.best.energy_to_solution_kJ / units.kJ for size in sizes],
            "line": {"color": TEXT, "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
        }
    )
    for i, size in enumerate(sizes):
        front = fronts[size.gpus]
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{size.gpus} GPUs",
                "x": [p.time_to_solution_s / units.s for p in front],
                "y": [p.energy_to_solution_kJ / units.kJ for p in front],
                "marker": {
                    "color": SERIES[i % len(SERIES)],
                    "symbol": SYMBOLS[i % len(SYMBOLS)],
                    "size": [14 if p is size.best else 6 for p in front],
                },
                "line": {"color": SERIES[i % len(SERIES)], "width": 1},
                "hovertemplate": f"{size.gpus} GPUs<br>%{{x:.3g}} {units.time}<br>"
                f"%{{y:.4g}} {units.energy}<extra></extra>",
            }
        )
    return figure
