"""The report's middle parts, which give the reasons: was the choice verified, where do its time and
energy go, what does each knob buy, and what did a probe's power look like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from tuner.display.figures.power import Timeline, phase_means
from tuner.display.html.pieces import estimated_mark, panels, plot_div, section
from tuner.display.view import View
from tuner.formatting import change, number, percent

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.models.analytic.model import Breakdown
    from tuner.results.parts import Explanation


def breakdown_part(view: View, parts: Breakdown | None, figures: Mapping[str, go.Figure]) -> str:
    """Return the section on the choice's step time and energy by parts, from the models."""
    result = view.result
    if parts is None or "breakdown-time" not in figures or result.best is None:
        return ""
    measured_s = result.best.time_to_solution_s / result.steps
    measured_J = 1000 * result.best.energy_to_solution_kJ / result.steps
    text = f"The models predict {number(parts.step_time_s)} s and {number(parts.energy_J)} J a step"
    note = "A prediction of the analytic models for the choice, along the busiest pipeline stage."
    if not view.is_predicted:
        text += (
            f"; measured: {number(measured_s)} s and {number(measured_J)} J"
            f"{estimated_mark(result.best.meter.mark)}, so the prediction is "
            f"{change(parts.step_time_s, measured_s, 'below', 'above')} in time and "
            f"{change(parts.energy_J, measured_J, 'below', 'above')} in energy"
        )
        note += " The shares explain; the figures of the front are measured."
    shown = panels(figures, "breakdown")
    return section("Where its time and energy go", f"<p>{text}.</p>{shown}", note)


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
    text += (
        f"<details><summary>Every other value that was tried ({len(explanation.knobs)})</summary>"
        f"<ul>{items}</ul></details>"
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in explanation.notes)
    return section(
        "What each knob bought",
        text + notes,
        "The recommended value of a knob against today's, all else equal, from the surrogates' "
        "joint posterior; bars are 90 % intervals. Left of zero is less.",
    )


def power_part(
    timelines: Mapping[str, Timeline], left_out: Sequence[str], figures: Mapping[str, go.Figure]
) -> str:
    """Return the section on the power of probes over time, with windows and phases.

    Args:
        timelines, left_out: as of `tuner.display.figures.power.shown_timelines`.
    """
    text = "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in left_out)
    for name, timeline in timelines.items():
        record = timeline.record
        mark = "best" if name == "best" else "base"
        word = "recommended" if name == "best" else "today"
        text += (
            f'<h3><span class="mark {mark}">{word}</span> probe {escape(record.request.probe_id)}'
            f"{estimated_mark(record.meter.mark)}</h3>"
        )
        text += plot_div(
            f"timeline-{name}",
            figures[f"timeline-{name}"],
            f"Power of a probe: {word}",
            small=True,
        )
        if f"phases-{name}" in figures:
            text += (
                '<p class="note">A few steps from the middle of a window, by the phases that the '
                "training program marks:</p>"
            )
            text += plot_div(
                f"phases-{name}", figures[f"phases-{name}"], "Power by phase", small=True
            )
        if means := phase_means(timeline):
            text += _phase_table(means)
    if not text:
        return ""
    return section(
        "The power of a probe over time",
        text,
        "Shaded: the windows in which time and energy were taken, dotted their mean; before the "
        "first the launch and the warm-up. Samples draw this picture; the energy of a window is "
        "the difference of the meter's counter at its two boundaries.",
    )


def _phase_table(means: Sequence[tuple[str, float, float]]) -> str:
    total = math.fsum(seconds for _, seconds, _ in means)
    rows = "".join(
        f'<tr><td data-label="Phase">{escape(name)}</td>'
        f'<td class="n" data-label="Time a step">{number(1000 * seconds)} ms</td>'
        f'<td class="n" data-label="Share">{percent(seconds / total) if total else "unknown"}</td>'
        f'<td class="n" data-label="Sampled power">'
        f"{f'{number(power)} W' if math.isfinite(power) else 'no sample'}</td></tr>"
        for name, seconds, power in means
    )
    heads = "<th>Phase</th><th>Time a step</th><th>Share</th><th>Mean sampled power</th>"
    return f'<table class="cards"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
