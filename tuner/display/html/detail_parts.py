"""The report's lower parts, for engineers: a plan's sizes and probes, where time and energy go,
what each knob bought, a probe's power, what the search spent, how good its models are, what failed
and why, and what was asked of what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tuner.display.figures.power import Timeline, phase_means
from tuner.display.html.pieces import (
    chips,
    estimated_mark,
    folded,
    notes,
    plot_div,
    section,
    table,
    value_html,
)
from tuner.display.view import View, figure_texts
from tuner.formatting import Units, label, number, percent
from tuner.problem.limits import LIMITS
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.measure.stragglers import words

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.results.parts import Explanation

_ASKED = {
    **{limit.name: limit.label for limit in LIMITS},
    "probe_budget_kJ": "energy budget of the search (kJ)",
    "max_probes": "most probes",
    "search_s": "longest search (s)",
    "search_share": "energy of the search as a share of today's training",
    "price_per_kWh": "price of a kWh",
    "price_per_gpu_hour": "price of a GPU hour",
    "grid_gCO2_per_kWh": "carbon intensity of the grid (g CO2e/kWh)",
}
#: Parts of `about` that stand in a section of their own.
_SHOWN_ELSEWHERE = ("unit_of_work",)


def plan_part(result: Result) -> str:
    """Return the sections of a plan; "" for a study."""
    plan, text = result.plan, ""
    if plan is None:
        return ""
    if plan.sizes:
        units, rows = Units.of([size.best for size in plan.sizes]), []
        for size in plan.sizes:
            role = " <strong>knee</strong>" if size.is_knee else ""
            role += "" if size.choice.met else " beyond the limits"
            time, energy, _ = figure_texts(size.best, units)
            power, knobs = number(size.best.power_W), chips(size.best.configuration)
            rows.append([f"{size.gpus}{role}", time, energy, power, knobs])
        text = section(
            "How many GPUs",
            table(("GPUs", "Time", "Energy", "Power (W)", "Configuration"), rows),
            "The choice on each number of GPUs under the same limits, predicted. The knee is the "
            "size beyond which time is bought dearest.",
        )
    if plan.probes:
        today = result.baseline.configuration if result.baseline is not None else None
        items = "".join(f"<li>{chips(each, against=today)}</li>" for each in plan.probes)
        text += section(
            "What to measure before this plan is trusted",
            f"<ol>{items}</ol>",
            "The measurements that would reduce the uncertainty of the front most, one after the "
            "other, today first. "
            f"<code>tuner optimize --plan {escape(result.name)}</code> begins with them.",
        )
    return text


def where_part(view: View, explanation: Explanation | None) -> str:
    """Return the section on the parts of the choice's step; "" where no model knows the job."""
    if explanation is None or not explanation.time_s:
        return ""
    units = ((explanation.time_s, "s"), (explanation.energy_J, "J"))
    rows = []
    for name in dict.fromkeys((*explanation.time_s, *explanation.energy_J)):
        cells = [escape(name)]
        for parts, unit in units:
            value, whole = parts.get(name, 0.0), math.fsum(parts.values())
            cells += [f"{number(value)} {unit}", percent(value / whole)] if value else ["", ""]
        rows.append(cells)
    energy = f"Energy of a step{label(explanation.mark)}"
    heads = ("Part", "Time of a step", "Share", energy, "Share")
    note = "Predicted shares of the choice's step, along the busiest pipeline stage."
    if not view.is_predicted:
        error = explanation.model_error
        note = (
            "Measured time and energy of the choice's step, by the analytic models' shares along "
            "the busiest pipeline stage; the models alone would have been off by "
            + ", ".join(f"{name} {100 * share:+.0f} %" for name, share in error.items())
            + "."
        )
    return section(
        "Where its time and energy go", table(heads, rows, cards=True, figures=(1, 2, 3, 4)), note
    )


def explanation_part(explanation: Explanation | None, figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the knobs' effects around the choice."""
    if explanation is None or not explanation.knobs:
        return ""
    text = ""
    if "knobs" in figures:
        figure = figures["knobs"]
        rows = len(figure.layout.yaxis.tickvals)  # two lines of text each
        what = "What each knob changes at the choice"
        text += plot_div("knobs", figure, what, height_px=120 + 34 * rows)
    items = "".join(f"<li>{escape(effect.sentence)}</li>" for effect in explanation.knobs)
    said = f"Every other value that was tried ({len(explanation.knobs)})"
    text += folded(said, f"<ul>{items}</ul>")
    text += "".join(f"<p>{escape(note)}</p>" for note in explanation.notes)
    return section(
        "What each knob bought",
        text,
        "The recommended value of a knob against today's, all else equal, from the surrogates' "
        "joint posterior; bars are 90 % intervals. Left of zero is less.",
    )


def power_part(
    timelines: Mapping[str, Timeline], left_out: Sequence[str], figures: Mapping[str, go.Figure]
) -> str:
    """Return the section on the power of probes over time, with windows and phases; the timelines
    are those of `shown_timelines`."""
    text = notes(*map(escape, left_out))
    for name, timeline in timelines.items():
        record = timeline.record
        kind, word = ("best", "recommended") if name == "best" else ("base", "today")
        probe = f"probe {escape(record.request.probe_id)}{estimated_mark(record.meter.mark)}"
        text += f'<h3><span class="mark {kind}">{word}</span> {probe}</h3>'
        key = f"timeline-{name}"
        text += plot_div(key, figures[key], f"Power of a probe: {word}", small=True)
        if means := phase_means(timeline):
            total = math.fsum(seconds for _, seconds, _ in means)
            rows = [
                (
                    *(escape(phase), f"{number(1000 * seconds)} ms"),
                    percent(seconds / total) if total else "unknown",
                    f"{number(power)} W" if math.isfinite(power) else "no sample",
                )
                for phase, seconds, power in means
            ]
            heads = ("Phase", "Time a step", "Share", "Mean sampled power")
            text += table(heads, rows, cards=True, figures=(1, 2, 3))
    if not text:
        return ""
    return section(
        "The power of a probe over time",
        text,
        "Shaded: the windows in which time and energy were taken, dotted their mean; before the "
        "first the launch and the warm-up. Samples draw this picture; the energy of a window is "
        "the difference of the meter's counter at its two boundaries.",
    )


def spent_part(view: View, figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the search's cost."""
    result, spent, plan = view.result, view.result.spent, view.is_predicted
    if result.points and spent.energy_kJ == 0:
        said = f"<p>{escape(result.stopped)}</p>"
        return section("What the search spent", said) if result.stopped else ""
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
    if (loo := result.leave_one_out) is not None:
        inside = f"{percent(loo.coverage)} of the left-out values lay inside their 90 % interval."
        rows.append(("Models", escape(f"{view.surrogates} {inside}")))
    text = "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"
    if "hypervolume" in figures:
        alt = "The front against the energy spent"
        text += plot_div("hypervolume", figures["hypervolume"], alt, small=True)
    return section(title, text)


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
        log = '<p class="muted">It left no log.</p>'
        if tail:
            log = folded("the last lines of its log", f"<pre>{escape(tail)}</pre>")
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
    rows = [[*map(escape, (probe, *words(each)))] for probe, each in result.stragglers]
    return section(
        f"Stragglers ({len(result.stragglers)})",
        table(("probe", "straggler", "evidence", "of the step"), rows),
        "Ranks for which the others of a probe waited; what was measured with them is slower than "
        "the configuration is.",
    )


def about_part(view: View) -> str:
    """Return the section on the study's constraints, space, job and cluster."""
    result = view.result
    given = {**result.limits.to_json(), **result.request.to_json()}
    asked = {_ASKED[name]: f"{value:,.10g}" for name, value in given.items() if name in _ASKED}
    steps = f"{result.length:,}" if result.length else "unknown"
    first: dict[str, Any] = {
        **(asked or {"constraints": "none"}),
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
    return section("What was asked, and of what", folded("Limits, space, job and cluster", text))
