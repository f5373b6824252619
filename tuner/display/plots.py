"""The result as Plotly figures.

Each function takes a `Result` and returns one figure, or None where there is nothing to draw, so
that no empty panel is ever shown. All share one look (`tuner.display.figures`), name the unit
on every axis and say "estimated" where the energy is. Text that a user or a script wrote is
escaped, because Plotly reads tags in it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.answer.answer import Answer
from tuner.answer.parts import Explanation, Point
from tuner.display.figures import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    SERIES,
    SYMBOLS,
    Axis,
    Timeline,
    empty_figure,
    error_bars,
    front_figure,
    points_trace,
    scatter_trace,
    shown_timelines,
    timeline_figure,
    wrapped,
)
from tuner.display.view import View
from tuner.formatting import (
    Units,
    after_comma,
    percent,
    short,
    value_text,
    varying_knobs,
)
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.plugins import shipped_module
from tuner.workload.records.probe import ProbeRecord
from tuner.workload.records.trace import read_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.answer.parts import Explanation, KnobEffect

_AXIS_NAMES = {"clock_MHz": "SM clock (MHz)", "power_limit_W": "Power limit (W)"}


def hypervolume_figure(result: Answer) -> go.Figure | None:
    """Draw the front's hypervolume, relative to its last value, over the joules of the probes."""
    pairs = [(e, v) for e, v in result.progress if math.isfinite(e) and math.isfinite(v)]
    if len(pairs) < 2 or max(v for _, v in pairs) <= 0:
        return None
    units, view = Units.for_values([e for e, _ in pairs], []), View(result)
    final = pairs[-1][1] or max(v for _, v in pairs)
    figure = empty_figure(
        f"Energy spent probing ({units.energy}{after_comma(view.mark)})",
        "Hypervolume (% of the last)",
        {"rangemode": "tozero"},
        {"rangemode": "tozero"},
    )
    hover = [
        f"after probe {i}: {units.energy_text(e)}{view.estimated}, {percent(v / final)}"
        for i, (e, v) in enumerate(pairs, 1)
    ]
    trace = scatter_trace(
        [0.0, *(e / units.kJ for e, _ in pairs)],
        [0.0, *(100 * v / final for _, v in pairs)],
        hover=["before the first probe", *hover],
        line={"shape": "hv", "color": BLUE, "width": 2},
        marker={"size": 5, "color": BLUE},
    )
    figure.add_trace(trace)
    return figure


def _live_curves(result: Answer, knob: str) -> list[list[Point]]:
    # Points that differ in the knob alone, by its value, where two values were visited.
    curves: dict[tuple[Settings, Settings], list[Point]] = {}
    for point in result.points:
        live = point.configuration.live
        if isinstance(live.get(knob), int):
            rest = Settings({k: v for k, v in live.items() if k != knob})
            curves.setdefault((point.configuration.launch, rest), []).append(point)
    several = [points for points in curves.values() if len(points) > 1]
    return [sorted(points, key=lambda p: p.configuration.live[knob]) for points in several]


def live_figure(result: Answer, most: int = 6) -> go.Figure | None:
    """Energy against the live knob that varied (the clock first), one curve a launch setting.

    Only the `most` curves with the least energy are drawn, and none that stays above twice the
    least; None where no live knob varied.
    """
    names = sorted(
        {name for p in result.points for name in p.configuration.live},
        key=lambda name: (name != "clock_MHz", name),
    )
    found = ((name, curves) for name in names if (curves := _live_curves(result, name)))
    knob, curves = next(found, ("", []))
    if not curves:
        return None
    curves = sorted(curves, key=lambda c: min(p.energy_to_solution_kJ for p in c))[:most]
    least_kJ = min(p.energy_to_solution_kJ for p in curves[0])
    # A launch setting that never comes near would squeeze the valleys of those that do.
    curves = [c for c in curves if min(p.energy_to_solution_kJ for p in c) <= 2 * least_kJ]
    varying = [
        name for name in varying_knobs(p.configuration for c in curves for p in c) if name != knob
    ]
    view = View(result)
    units, drawn = view.units, [p for c in curves for p in c]
    y_axis = Axis(
        (p.energy_to_solution_kJ / units.kJ for p in drawn),
        (e / units.kJ for p in drawn for e in p.energy_interval_kJ),
    )
    figure = empty_figure(
        html.escape(_AXIS_NAMES.get(knob, knob)),
        f"Energy to solution ({units.energy}{after_comma(view.mark)})",
        {},
        y_axis.layout(),
    )
    for curve, colour, symbol in zip(curves, SERIES, SYMBOLS, strict=False):
        least = min(curve, key=lambda p: p.energy_to_solution_kJ)
        name = short(curve[0].configuration, varying) if varying else "one launch setting"
        sizes = [12 if p is least else 7 for p in curve]
        marker = {"color": colour, "symbol": symbol, "size": sizes}
        trace = points_trace(view, curve, html.escape(name), "At this setting", marker)
        del trace["error_x"]
        x = [p.configuration.live[knob] for p in curve]
        line = {"color": colour, "width": 1.5}
        figure.add_trace({**trace, "mode": "lines+markers", "x": x, "line": line})
    return figure


def explained(result: Answer) -> Explanation | None:
    """Return why the choice is as it is; None without a choice, or without what explains it."""
    comparison: Any = shipped_module("tuner.comparison.explain")
    if result.best is None or comparison is None:
        return None
    try:
        found: Explanation = comparison.explain(result, result.best.configuration)
        return found
    except (InputError, KeyError, TypeError, ValueError):
        return None  # a page that shows an answer does not fail for what only explains it


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
    hover = [wrapped(effect.sentence) for effect in effects]
    series = [("energy", GREEN, "circle", 0.14), ("time", ORANGE, "diamond", -0.14)]
    series = series if effects[0].energy is not None else series[1:]
    for quantity, colour, symbol, shift in series:
        changes = [[100 * part for part in getattr(effect, quantity)] for effect in effects]
        x, y = [middle for middle, _, _ in changes], [i + shift for i in range(len(effects))]
        marker = {"color": colour, "symbol": symbol, "size": 8}
        trace = scatter_trace(x, y, name=quantity, hover=hover, marker=marker)
        trace["error_x"] = error_bars(x, [(low, high) for _, low, high in changes], colour, 1.2)
        figure.add_trace(trace)
    figure.update_yaxes(
        tickvals=list(range(len(effects))), ticktext=names, range=[-0.6, len(effects) - 0.4]
    )
    return figure


def _instead(effect: KnobEffect) -> str:
    # "micro_batch" and below it "4, not 1", escaped.
    value, other = (html.escape(value_text(v)) for v in (effect.value, effect.instead_of))
    return f"{html.escape(effect.knob)}<br>{value}, not {other}"


#: Titles of the figures that the dashboard shows.
TITLES = {
    "front": "Front of energy against time",
    "live": "Energy against the live setting",
    "hypervolume": "Front against probing energy",
}


def figures(
    result: Answer,
    records: Sequence[ProbeRecord] = (),
    *,
    explanation: Explanation | None = None,
    timelines: Mapping[str, Timeline] | None = None,
) -> dict[str, go.Figure]:
    """Return every figure that has something to draw, by name; that of the knobs only with an
    explanation."""
    timelines = shown_timelines(result, records)[0] if timelines is None else timelines
    metered = result.has_energy
    drawn = {
        "front": front_figure(result) if metered else None,
        "live": live_figure(result) if metered else None,
        "knobs": knobs_figure(explanation) if explanation else None,
        "hypervolume": hypervolume_figure(result) if metered else None,
        **{f"timeline-{name}": timeline_figure(each) for name, each in timelines.items()},
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def plot(result: Answer, kind: str = "front") -> go.Figure:
    """Return one figure of a result by name (`Result.plot`)."""
    trace = result.run_dir / "trace" / "probes.jsonl" if result.run_dir else None
    records = read_trace(trace).records if trace is not None and trace.is_file() else ()
    explanation = explained(result) if kind == "knobs" else None
    drawn = figures(result, records, explanation=explanation)
    if kind not in drawn:
        raise UnknownName("figure of this result", kind, list(drawn))
    return drawn[kind]
