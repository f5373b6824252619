"""The result as Plotly figures.

Each function takes a `Result` and returns one figure, or None where there is nothing to draw, so
that no empty panel is ever shown. All share one look (`tuner.display.figures.style`), name the unit
on every axis and say "estimated" where the energy is. Text that a user or a script wrote is
escaped, because Plotly reads tags in it.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from tuner.display.figures.front import front_figure
from tuner.display.figures.power import (
    Timeline,
    phases_figure,
    shown_timelines,
    timeline_figure,
)
from tuner.display.figures.style import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    SERIES,
    SYMBOLS,
    Axis,
    bar_trace,
    empty_figure,
    error_bars,
    points_trace,
    scatter_trace,
    wrapped,
)
from tuner.display.view import View
from tuner.formatting import (
    Units,
    after_comma,
    common_mark,
    label,
    number,
    percent,
    short,
    value_text,
    varying_knobs,
)
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.probe import ProbeRecord
from tuner.workload.trace import read_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.models.analytic.model import Breakdown
    from tuner.results.parts import Explanation, KnobEffect

_AXIS_NAMES = {"clock_MHz": "SM clock (MHz)", "power_limit_W": "Power limit (W)"}


def hypervolume_figure(result: Result) -> go.Figure | None:
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


def surrogate_figure(result: Result, what: Literal["time", "power"]) -> go.Figure | None:
    """Left-out measurements as the surrogates predicted them, with the line of equality."""
    loo = result.leave_one_out
    if loo is None or not loo.pairs:
        return None
    column = 0 if what == "time" else 2
    measured = [pair[column] for pair in loo.pairs]
    predicted = [pair[column + 1] for pair in loo.pairs]
    unit, title = ("s", "step time") if what == "time" else ("W", "power")
    mark = View(result).mark if what == "power" else ""
    said, note = label(mark), after_comma(mark)
    axis = Axis([*measured, *predicted])
    figure = empty_figure(
        f"Measured {title} ({unit}{note})", f"Predicted {title} ({unit}{note})", axis.layout(), {}
    )
    figure.update_layout(yaxis=axis.layout())
    ends = [axis.low or min(measured) / 2, axis.high]
    figure.add_trace(scatter_trace(ends, ends, line={"color": MUTED, "width": 1, "dash": "dash"}))
    hover = [
        f"measured {number(m)} {unit}{said}<br>predicted {number(p)} {unit}{said}<br>"
        f"error {percent(p / m - 1) if m else 'unknown'}"
        for m, p in zip(measured, predicted, strict=True)
    ]
    marker = {"color": BLUE, "size": 8, "opacity": 0.8}
    figure.add_trace(scatter_trace(measured, predicted, hover=hover, marker=marker))
    return figure


def _live_curves(result: Result, knob: str) -> list[list[Point]]:
    # Points that differ in the knob alone, by its value, where two values were visited.
    curves: dict[tuple[Settings, Settings], list[Point]] = {}
    for point in result.points:
        live = point.configuration.live
        if isinstance(live.get(knob), int):
            rest = Settings({k: v for k, v in live.items() if k != knob})
            curves.setdefault((point.configuration.launch, rest), []).append(point)
    several = [points for points in curves.values() if len(points) > 1]
    return [sorted(points, key=lambda p: p.configuration.live[knob]) for points in several]


def live_figure(result: Result, most: int = 6) -> go.Figure | None:
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
        trace = points_trace(curve, html.escape(name), "At this setting", units, marker)
        del trace["error_x"]
        x = [p.configuration.live[knob] for p in curve]
        line = {"color": colour, "width": 1.5}
        figure.add_trace({**trace, "mode": "lines+markers", "x": x, "line": line})
    return figure


def probes_figure(result: Result, records: Sequence[ProbeRecord] = ()) -> go.Figure | None:
    """Draw the cost of each probe, in order.

    With `records` each bar names its probe and failed ones are highlighted; without, the bars are
    the differences of `result.progress`.
    """
    if records:
        costs = [record.energy_J / 1000 for record in records]
        failed = [not record.ok for record in records]
        texts = [
            f"<b>{html.escape(r.request.probe_id)}</b>, {html.escape(r.request.purpose)}"
            f"{'' if r.failure is None else ', failed: ' + html.escape(r.failure.type.phrase)}<br>"
            f"{wrapped(r.request.launch.short)}<br>launch {number(r.launch_s)} s, "
            f"in all {number(r.wall_s)} s, {len(r.measurements)} windows"
            for r in records
        ]
    else:
        totals = [0.0, *(energy for energy, _ in result.progress)]
        costs = [b - a for a, b in itertools.pairwise(totals)]
        failed = [False] * len(costs)
        texts = [f"<b>probe {i}</b>" for i in range(1, len(costs) + 1)]
    if not costs or max(costs) <= 0:
        return None
    units = Units.for_values(costs, [])
    estimated = common_mark(r.meter for r in records) if records else View(result).mark
    figure = empty_figure(
        "Probe, in the order of finishing",
        f"Energy of the probe ({units.energy}{after_comma(estimated)})",
        {"showgrid": False, **({"dtick": 1} if len(costs) <= 20 else {})},
        {"rangemode": "tozero"},
    )
    figure.update_layout(bargap=0.25, barmode="overlay")
    kinds = ((False, "completed", BLUE, ""), (True, "failed", ORANGE, "/"))
    for is_failed, name, colour, pattern in kinds:
        chosen = [i for i, bad in enumerate(failed) if bad == is_failed]
        if chosen:
            marker = {"color": colour, "pattern": {"shape": pattern}}
            hover = [
                f"{texts[i]}<br>{units.energy_text(costs[i])}{label(estimated)}" for i in chosen
            ]
            heights = [costs[i] / units.kJ for i in chosen]
            shown = name if any(failed) else ""
            figure.add_trace(bar_trace([i + 1 for i in chosen], heights, marker, hover, shown))
    return figure


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


def _bars(
    parts: Mapping[str, float], title: str, unit: str, colour: str, scale: float
) -> go.Figure:
    # Horizontal bars, the largest at the top, each with its share.
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
    return _bars(large, f"{unit} of a step, predicted", unit, colour, scale)


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
    looks = (("energy", GREEN, "circle", 0.14), ("time", ORANGE, "diamond", -0.14))
    for what, colour, symbol, shift in looks:
        changes = [[100 * part for part in getattr(effect, what)] for effect in effects]
        x, y = [middle for middle, _, _ in changes], [i + shift for i in range(len(effects))]
        marker = {"color": colour, "symbol": symbol, "size": 8}
        trace = scatter_trace(x, y, name=what, hover=hover, marker=marker)
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


@dataclass(frozen=True)
class Drawn:
    """What the figures of a result are drawn from."""

    result: Result
    records: Sequence[ProbeRecord] = ()
    explanation: Explanation | None = None
    parts: Breakdown | None = None
    timelines: Mapping[str, Timeline] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """Figure of a result.

    Attributes:
        title: on the dashboard; empty if it is not shown there.
        place: part of the page in which it is a small plot beside others, with the title `panel`.
        metered: it shows energies or powers, which the mark of the meter follows.
    """

    name: str
    draw: Callable[[Drawn], go.Figure | None]
    title: str = ""
    place: str = ""
    panel: str = ""
    metered: bool = False


def _of_timeline(
    draw: Callable[[Timeline], go.Figure | None], name: str, of: Drawn
) -> go.Figure | None:
    return draw(of.timelines[name]) if name in of.timelines else None


#: Every figure, in the order of reading.
FIGURES = (
    Figure("front", lambda of: front_figure(of.result), "Front of energy against time"),
    Figure("live", lambda of: live_figure(of.result), "Energy against the live setting"),
    *(
        Figure(
            f"breakdown-{what}",
            partial(lambda what, of: breakdown_figure(of.parts, what), what),
            f"Where the choice's {what} goes (predicted)",
            "breakdown",
            what.capitalize(),
        )
        for what in ("time", "energy")
    ),
    Figure("knobs", lambda of: knobs_figure(of.explanation) if of.explanation else None),
    Figure(
        "hypervolume",
        lambda of: hypervolume_figure(of.result),
        "Front against probing energy",
        "spent",
        "The front against the energy spent",
    ),
    Figure(
        "probes",
        lambda of: probes_figure(of.result, of.records),
        "What each probe cost",
        "spent",
        "What each probe cost",
    ),
    *(
        Figure(
            f"surrogate-{what}",
            partial(lambda what, of: surrogate_figure(of.result, what), what),
            f"{title}: predicted and measured",
            "surrogates",
            title,
            metered=what == "power",
        )
        for what, title in (("time", "Step time"), ("power", "Power"))
    ),
    *(
        Figure(f"{kind}-{name}", partial(_of_timeline, draw, name))
        for name in ("best", "baseline")
        for kind, draw in (("timeline", timeline_figure), ("phases", phases_figure))
    ),
)


def figures(
    result: Result,
    records: Sequence[ProbeRecord] = (),
    *,
    explanation: Explanation | None = None,
    parts: Breakdown | None = None,
    timelines: Mapping[str, Timeline] | None = None,
) -> dict[str, go.Figure]:
    """Return every figure of `FIGURES` that has something to draw, by name; that of the knobs
    only with an explanation."""
    timelines = shown_timelines(result, records)[0] if timelines is None else timelines
    parts = breakdown(result) if parts is None else parts
    of = Drawn(result, records, explanation, parts, timelines)
    drawn = {each.name: each.draw(of) for each in FIGURES}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def plot(result: Result, kind: str = "front") -> go.Figure:
    """Return one figure of a result by name, as `Result.plot` says."""
    trace = result.run_dir / "trace" / "probes.jsonl" if result.run_dir else None
    records = read_trace(trace).records if trace is not None and trace.is_file() else ()
    explanation = explained(result) if kind == "knobs" else None
    drawn = figures(result, records, explanation=explanation)
    if kind not in drawn:
        raise UnknownName("figure of this result", kind, list(drawn))
    return drawn[kind]
