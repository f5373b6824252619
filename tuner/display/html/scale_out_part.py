"""The report's page of the front predicted for more GPUs than were probed
(`tuner.results.scale_out`)."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from tuner.display.figures.front import front_figure
from tuner.display.html.pieces import chips, estimated_mark, interval, plot_div, section
from tuner.display.text import units_of
from tuner.formatting import Units, number, percent, varying_knobs
from tuner.results.parts import Point
from tuner.results.result import Result

__all__ = ["target_part"]


def _row(point: Point, units: Units, names: tuple[str, ...], role: str) -> str:
    return (
        f"<tr><td>{chips(point.configuration, names)}{role}</td>"
        f"<td>{units.energy_text(point.energy_to_solution_kJ)}<br>"
        f"{interval(units.interval_text(point.energy_interval_kJ, units.kJ), units.energy)}</td>"
        f"<td>{units.time_text(point.time_to_solution_s)}<br>"
        f"{interval(units.interval_text(point.time_interval_s, units.s), units.time)}</td>"
        f"<td>{number(point.power_W)}</td>"
        f"<td>{percent(point.p_nondominated) if point.windows == 0 and role == '' else ''}</td>"
        f"<td>{escape('; '.join(point.flags))}</td></tr>"
    )


def target_part(result: Result) -> str:
    """Return the section on more GPUs; "" if the study has no target."""
    target = result.target
    if target is None:
        return ""
    shown = list(target.front_points)
    if target.baseline is not None:
        shown.append(target.baseline)
    # The same drawing as the measured front's, of a result that holds predicted points alone.
    alone = replace(
        result,
        points=target.front_points,
        front_points=target.front_points,
        best=target.best,
        baseline=target.baseline,
        choice=target.choice,
        predicted=(),
        attainment=None,
        target=None,
    )
    units = units_of(alone)
    names = tuple(varying_knobs(point.configuration for point in shown))
    rows = []
    for point in shown:
        role = " <strong>choice</strong>" if point is target.best else ""
        role = " <strong>default</strong>" if point is target.baseline else role
        rows.append(_row(point, units, names, role))
    heads = ("Configuration", "Energy", "Time", "Power (W)", "P(non-dominated)", "Note")
    head = "".join(f"<th>{each}</th>" for each in heads)
    figure = front_figure(alone, chosen="chosen")
    plot = (
        plot_div("target", figure, f"Predicted energy against time on {target.gpus} GPUs")
        if figure is not None
        else ""
    )
    left_out = (
        f" {target.left_out:,} more are left out: they are unlikely to fit in memory."
        if target.left_out
        else ""
    )
    text = (
        f'<p class="warning">{escape(target.sentence)}{left_out}</p>{plot}'
        f"<p>{escape(target.choice.sentence)}</p>"
        f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
    note = (
        f"On {target.gpus} GPUs of {escape(target.cluster)}; no probe ran there."
        f"{estimated_mark('estimated')} Intervals are 90 %: they hold what the probes left open of "
        "the "
        "models' constants, a share more for every doubling of the GPUs, and each launch's own."
    )
    return section(f"The front predicted for {target.gpus} GPUs", text, note)
