"""The report's lower parts, for engineers: what the search did, how good its models are, what
failed and why, and what was asked of what."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from tuner.display.html.pieces import chips, estimated_mark, panels, plot_div, section, value_html
from tuner.display.view import View
from tuner.formatting import Units, label, number, percent
from tuner.models.surrogate import LeaveOneOut
from tuner.problem.constraints import LIMITS
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.measure.stragglers import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

_CONSTRAINTS = {
    **{limit.name: limit.label for limit in LIMITS},
    "probe_budget_kJ": "energy budget of the search (kJ)",
    "max_probes": "most probes",
    "search_s": "longest search (s)",
    "price_per_kWh": "price of a kWh",
    "price_per_gpu_hour": "price of a GPU hour",
    "grid_gCO2_per_kWh": "carbon intensity of the grid (g CO2e/kWh)",
}
#: Parts of `about` that stand in a section of their own.
_SHOWN_ELSEWHERE = ("unit_of_work", "calibration")


def spent_part(view: View, figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the search's cost."""
    result, spent, plan = view.result, view.result.spent, view.is_predicted
    if result.points and spent.energy_kJ == 0:
        return section("What the search spent", f"<p>{escape(result.stopped)}</p>")
    time = Units.for_values([], [spent.time_s])
    title = "What a real search would take" if plan else "What the search spent"
    rows = [
        ("Energy", view.spent + estimated_mark(view.mark)),
        ("Time on the cluster" if plan else "Wall-clock time", time.time_text(spent.time_s)),
        ("Probes", f"{spent.probes}, of which {spent.failed} failed"),
        ("Windows simulated" if plan else "Windows measured", str(spent.measurements)),
        ("Payback", escape(view.payback)),
        ("Ended because", escape(result.stopped or "it is not recorded")),
    ]
    text = "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"
    return section(title, text + panels(figures, "spent"))


def live_part(figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the live setting; "" if there is no such figure."""
    if "live" not in figures:
        return ""
    return section(
        "Energy against the live setting",
        plot_div("live", figures["live"], "Energy to solution against the live setting"),
        "One curve a launch setting, those with the least energy; the larger marker is each "
        "curve's least.",
    )


def _coverage(loo: LeaveOneOut) -> str:
    if loo.coverage < 0.8:
        return "fewer than promised: the surrogates' intervals are too narrow"
    return "as promised or better" if loo.coverage >= 0.9 else "close to what is promised"


def surrogates_part(view: View, figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the surrogates' leave-one-out errors."""
    loo = view.result.leave_one_out
    if loo is None and view.is_predicted:
        return ""
    if loo is None:
        return section(
            "How well the surrogates predict",
            "<p>There were too few measurements to leave one out.</p>",
        )
    text = (
        f"<p>Each of {loo.measurements} measurements was predicted from others "
        f"({loo.method}). The median "
        f"error was {percent(loo.time_error)} in step time and {percent(loo.power_error)} in "
        f"power; {percent(loo.coverage)} of the left-out values lay inside their 90 % interval "
        f"({_coverage(loo)}).</p>"
    )
    shown = panels(figures, "surrogates", view.mark)
    note = "Left-out measurements against their prediction; the dashed line is equality."
    return section("How well the surrogates predict", text + shown, note if shown else "")


def calibration_part(result: Result) -> str:
    """Return the section on the last `tuner dev calibrate` of this machine; "" if there is none."""
    found = result.about.get("calibration")
    if not isinstance(found, Mapping) or not found:
        return ""
    return section(
        "The meter's calibration",
        value_html(found),
        "By <code>tuner dev calibrate</code> on this machine: what metering costs the training, "
        "how often the energy counter moves, and whether its two sources agree.",
    )


def failures_part(result: Result) -> str:
    """Return the section on the failed probes; "" if there are none."""
    if not result.failures:
        return ""
    parts = []
    for record in result.failures:
        failure = record.failure
        kind = failure.type.phrase if failure else "unknown"
        message = failure.message if failure else ""
        tail = failure.log_tail.strip() if failure else ""
        cost = Units.for_values([record.energy_J / 1000], [])
        log = (
            "<details><summary>the last lines of its log</summary>"
            f"<pre>{escape(tail)}</pre></details>"
            if tail
            else '<p class="muted">It left no log.</p>'
        )
        parts.append(
            f"<h3>{escape(record.request.probe_id)}: {escape(kind)}</h3>"
            f"<div>{chips(Configuration(record.request.launch))}</div>"
            f"<p>{escape(message)} "
            f'<span class="muted">({cost.energy_text(record.energy_J / 1000)}'
            f"{estimated_mark(record.meter.mark)}, {number(record.wall_s)} s)</span></p>{log}"
        )
    return section(
        f"Probes that failed ({len(result.failures)})",
        "\n".join(parts),
        "A failed probe costs what it cost and is not tried for ever; what it had measured before "
        "it failed is kept.",
    )


def stragglers_part(result: Result) -> str:
    """Return the section on ranks that held the others back; "" if there were none."""
    if not result.stragglers:
        return ""
    names = ("probe", "straggler", "evidence", "of the step")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = (
        "".join(f"<td>{escape(word)}</td>" for word in (probe, *words(each)))
        for probe, each in result.stragglers
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return section(
        f"Stragglers ({len(result.stragglers)})",
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        "Ranks for which the others of a probe waited; what was measured with them is slower than "
        "the configuration is.",
    )


def about_part(view: View) -> str:
    """Return the section on the study's constraints, space, job and cluster."""
    result = view.result
    asked = {
        _CONSTRAINTS.get(name, name): f"{value:,.10g}"
        if isinstance(value, int | float)
        else str(value)
        for name, value in result.constraints.items()
    }
    asked = asked or {"constraints": "none"}
    steps = f"{result.steps:,}" if result.length_known else "unknown"
    first: dict[str, Any] = {
        **asked,
        "chosen by": result.choice.rule,
        f"{view.unit_of_work}s to the solution": steps,
    }
    scopes = sorted(
        {
            f"{p.meter.name}: {p.meter.scope} scope, {p.meter.source}"
            + label(p.meter.mark)
            + (f"; charged: {p.meter.host}" if p.meter.host else "")
            for p in result.points
        }
    )
    first["energy from"] = scopes or ["nothing was measured"]
    rest = {name: value for name, value in result.about.items() if name not in _SHOWN_ELSEWHERE}
    text = value_html({**first, **rest})
    folded = f"<details><summary>Limits, space, job and cluster</summary>{text}</details>"
    return section("What was asked, and of what", folded)
