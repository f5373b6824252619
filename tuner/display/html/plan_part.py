"""The report's part on a plan: the sizes, and the probes that would test it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from tuner.display.columns import ENERGY, TIME
from tuner.display.figures.style import SERIES, SYMBOLS, TEXT, Axis, empty_figure
from tuner.display.html.pieces import chips, plot_div, section
from tuner.formatting import Units, number
from tuner.results.choice import front_of
from tuner.results.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go


def plan_part(result: Result) -> str:
    """Return the sections of a plan; "" for a study."""
    return "\n".join(part for part in (_sizes(result), _probes(result)) if part)


def _sizes(result: Result) -> str:
    plan = result.plan
    if plan is None or not plan.sizes:
        return ""
    units = Units.of([size.best for size in plan.sizes])
    rows = []
    for size in plan.sizes:
        role = " <strong>knee</strong>" if size.is_knee else ""
        role += "" if size.choice.met else " beyond the limits"
        rows.append(
            f"<tr><td>{size.gpus}{role}</td>"
            f"<td>{TIME.text(size.best, units)}</td><td>{ENERGY.text(size.best, units)}</td>"
            f"<td>{number(size.best.power_W)}</td><td>{chips(size.best.configuration)}</td></tr>"
        )
    heads = ("GPUs", "Time", "Energy", "Power (W)", "Configuration")
    head = "".join(f"<th>{each}</th>" for each in heads)
    figure = _sizes_figure(result)
    plot = plot_div("sizes", figure, "Predicted fronts by number of GPUs") if figure else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    note = (
        "The choice on each number of GPUs under the same limits, predicted. The knee is the size "
        "beyond which time is bought dearest."
    )
    return section("How many GPUs", plot + table, note)


def _probes(result: Result) -> str:
    plan = result.plan
    if plan is None or not plan.probes:
        return ""
    today = result.baseline.configuration if result.baseline is not None else None
    items = "".join(f"<li>{chips(each, against=today)}</li>" for each in plan.probes)
    note = (
        "The measurements that would reduce the uncertainty of the front most, one after the "
        "other, today first. "
        f"<code>tuner optimize --plan {escape(result.name)}</code> begins with them."
    )
    return section("What to measure before this plan is trusted", f"<ol>{items}</ol>", note)


def _sizes_figure(result: Result) -> go.Figure | None:
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
