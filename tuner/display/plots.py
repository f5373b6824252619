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
from typing import TYPE_CHECKING, Any, Literal

from tuner.display.figures.breakdown import breakdown, breakdown_figure, explained, knobs_figure
from tuner.display.figures.front import front_figure
from tuner.display.figures.power import (
    Timeline,
    phases_figure,
    shown_timelines,
    timeline_figure,
)
from tuner.display.figures.style import (
    BLUE,
    MUTED,
    ORANGE,
    SERIES,
    SYMBOLS,
    Axis,
    bar_trace,
    empty_figure,
    line_trace,
    points_trace,
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
    varying_knobs,
)
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import UnknownName
from tuner.workload.probe import ProbeRecord
from tuner.workload.trace import read_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tuner.models.analytic.model import Breakdown
    from tuner.results.parts import Explanation

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
    trace = line_trace(
        [0.0, *(e / units.kJ for e, _ in pairs)],
        [0.0, *(100 * v / final for _, v in pairs)],
        {"shape": "hv", "color": BLUE, "width": 2},
        hover=[
            "before the first probe",
            *(
                f"after probe {i}: {units.energy_text(e)}{view.estimated}, {percent(v / final)}"
                for i, (e, v) in enumerate(pairs, 1)
            ),
        ],
    )
    trace |= {"mode": "lines+markers", "marker": {"size": 5, "color": BLUE}}
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
    figure.add_trace(line_trace(ends, ends, {"color": MUTED, "width": 1, "dash": "dash"}))
    figure.add_trace(
        {
            "type": "scatter",
            "mode": "markers",
            "x": measured,
            "y": predicted,
            "marker": {"color": BLUE, "size": 8, "opacity": 0.8},
            "hovertext": [
                f"measured {number(m)} {unit}{said}<br>predicted {number(p)} {unit}{said}<br>"
                f"error {percent(p / m - 1) if m else 'unknown'}"
                for m, p in zip(measured, predicted, strict=True)
            ],
            "hoverinfo": "text",
            "showlegend": False,
        }
    )
    return figure


def _live_curves(result: Result, knob: str) -> list[list[Point]]:
    """Points that differ in `knob` alone, by its value; only where two values were visited."""
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
    curves: list[list[Point]] = []
    knob = ""
    for knob in names:
        curves = _live_curves(result, knob)
        if curves:
            break
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
    units = view.units
    drawn = [p for c in curves for p in c]
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
        marker = {
            "color": colour,
            "symbol": symbol,
            "size": [12 if p is least else 7 for p in curve],
        }
        trace = points_trace(curve, html.escape(name), "At this setting", units, marker)
        del trace["error_x"]
        trace.update(
            mode="lines+markers",
            x=[p.configuration.live[knob] for p in curve],
            line={"color": colour, "width": 1.5},
        )
        figure.add_trace(trace)
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
    for is_failed, name, colour, pattern in (
        (False, "completed", BLUE, ""),
        (True, "failed", ORANGE, "/"),
    ):
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
        draw: None if there is nothing to draw.
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


def _of_timeline(name: str, draw: Callable[[Timeline], go.Figure | None]) -> Any:
    return lambda of: draw(of.timelines[name]) if name in of.timelines else None


#: Every figure, in the order of reading.
FIGURES = (
    Figure("front", lambda of: front_figure(of.result), "Front of energy against time"),
    Figure("live", lambda of: live_figure(of.result), "Energy against the live setting"),
    Figure(
        "breakdown-time",
        lambda of: breakdown_figure(of.parts, "time"),
        "Where the choice's time goes (predicted)",
        "breakdown",
        "Time",
    ),
    Figure(
        "breakdown-energy",
        lambda of: breakdown_figure(of.parts, "energy"),
        "Where the choice's energy goes (predicted)",
        "breakdown",
        "Energy",
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
    Figure(
        "surrogate-time",
        lambda of: surrogate_figure(of.result, "time"),
        "Step time: predicted and measured",
        "surrogates",
        "Step time",
    ),
    Figure(
        "surrogate-power",
        lambda of: surrogate_figure(of.result, "power"),
        "Power: predicted and measured",
        "surrogates",
        "Power",
        metered=True,
    ),
    Figure("timeline-best", _of_timeline("best", timeline_figure)),
    Figure("phases-best", _of_timeline("best", phases_figure)),
    Figure("timeline-baseline", _of_timeline("baseline", timeline_figure)),
    Figure("phases-baseline", _of_timeline("baseline", phases_figure)),
)


def figures(
    result: Result,
    records: Sequence[ProbeRecord] = (),
    *,
    explanation: Explanation | None = None,
    parts: Breakdown | None = None,
    timelines: Mapping[str, Timeline] | None = None,
) -> dict[str, go.Figure]:
    """Return every figure of `FIGURES` that has something to draw, by name.

    What was computed before (`parts`, `timelines`) can be handed in; without an explanation the
    figure of the knobs is left out.
    """
    if timelines is None:
        timelines, _ = shown_timelines(result, records)
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
