"""Horizontal bars of the choice's time and energy by part, and of each knob's effect."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from tuner.display.figures.style import BLUE, GREEN, MUTED, ORANGE, bar_trace, empty_figure, wrapped
from tuner.formatting import number, percent, value_text
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.models.analytic.model import Breakdown
    from tuner.results.parts import Explanation, KnobEffect
    from tuner.search_spaces.knobs import Value


def breakdown(result: Result) -> Breakdown | None:
    """Return a step of the choice by parts, from the analytic models; None without a model."""
    if result.best is None:
        return None
    job, cluster = result.job, result.cluster
    if job is None or cluster is None or not job.is_modelled:
        return None
    from tuner.models.analytic.model import AnalyticModel

    try:
        return AnalyticModel(job, cluster).breakdown(result.best.configuration)
    except (InputError, KeyError, TypeError, ValueError):
        return None  # a page that shows an answer does not fail for what only explains it


def explained(result: Result) -> Explanation | None:
    """Return why the choice is as it is; None without a choice or measurements."""
    if result.best is None or not result.windows:
        return None
    from tuner.results.explain import explain

    try:
        return explain(result, result.best.configuration)
    except (InputError, ValueError):
        return None  # as above


def bars(
    parts: Mapping[str, float], title: str, unit: str, colour: str, scale: float = 1.0
) -> go.Figure:
    """Horizontal bars, the largest at the top, each with its share."""
    total = sum(parts.values())
    names = list(parts)[::-1]
    figure = empty_figure(title, "", {"rangemode": "tozero"}, {"showgrid": False, "ticks": ""})
    shares = [percent(parts[name] / total) for name in names]
    hover = [
        f"{html.escape(name)}: {number(parts[name] / scale)} {unit}, {share}"
        for name, share in zip(names, shares, strict=True)
    ]
    values, labels = [parts[name] / scale for name in names], list(map(html.escape, names))
    trace = bar_trace(values, labels, {"color": colour}, hover, "")
    beside = {"text": [f" {share}" for share in shares], "textposition": "outside"}
    figure.add_trace({**trace, **beside, "orientation": "h", "cliponaxis": False})
    widest = max(parts.values(), default=0.0) / scale
    figure.update_layout(bargap=0.35, xaxis={"range": [0, 1.18 * widest]})
    return figure


def breakdown_figure(parts: Breakdown | None, what: Literal["time", "energy"]) -> go.Figure | None:
    """Draw where a configuration's time or energy of a step goes."""
    if parts is None or not parts.time_s or not parts.joules:
        return None
    if what == "time":
        shown, total, colour = parts.time_s, parts.step_time_s, BLUE
        scale, unit = (1e-3, "ms") if total < 1 else (1.0, "s")
    else:
        shown, total, colour = parts.joules, parts.energy_J, GREEN
        scale, unit = (1e3, "kJ") if total > 1e4 else (1.0, "J")
    large = {name: value for name, value in shown.items() if value >= 1e-3 * total}
    return bars(large, f"{unit} of a step, predicted", unit, colour, scale)


#: More effects than this are only in the table.
_MOST_EFFECTS = 14


def knobs_figure(explanation: Explanation) -> go.Figure | None:
    """Draw each knob's effect on energy and time at the point, with 90 % intervals."""
    effects = explanation.knobs[:_MOST_EFFECTS][::-1]
    if not effects:
        return None
    names = [_instead(effect) for effect in effects]
    figure = empty_figure("Change (%)", "", {"zeroline": True}, {"showgrid": False})
    figure.update_xaxes(zerolinecolor=MUTED, zerolinewidth=1)
    for what, colour, symbol, shift in (
        ("energy", GREEN, "circle", 0.14),
        ("time", ORANGE, "diamond", -0.14),
    ):
        changes = [getattr(effect, what) for effect in effects]
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "markers",
                "name": what,
                "x": [100 * middle for middle, _, _ in changes],
                "y": [i + shift for i in range(len(effects))],
                "marker": {"color": colour, "symbol": symbol, "size": 8},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [100 * (high - middle) for middle, _, high in changes],
                    "arrayminus": [100 * (middle - low) for middle, low, _ in changes],
                    "color": colour,
                    "thickness": 1.2,
                    "width": 0,
                },
                "hoverinfo": "text",
                "hovertext": [wrapped(effect.sentence) for effect in effects],
            }
        )
    figure.update_yaxes(
        tickvals=list(range(len(effects))), ticktext=names, range=[-0.6, len(effects) - 0.4]
    )
    return figure


def _instead(effect: KnobEffect) -> str:
    """ "micro_batch" and below it "4, not 1", escaped."""

    def value(of: Value | None) -> str:
        return html.escape(value_text(of))

    return f"{html.escape(effect.knob)}<br>{value(effect.value)}, not {value(effect.instead_of)}"
