"""The report's part on a plan: the sizes, and the probes that would test it."""

from __future__ import annotations

from html import escape

from tuner.display.columns import ENERGY, TIME
from tuner.display.figures.sizes import sizes_figure
from tuner.display.html.pieces import chips, plot_div, section
from tuner.formatting import Units, number
from tuner.results.result import Result


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
    figure = sizes_figure(result)
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
