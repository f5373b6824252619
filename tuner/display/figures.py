"""Figures of the report and the notebook."""

from __future__ import annotations

import bisect
import html
import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.answer.answer import Answer
from tuner.answer.parts import Attainment, Point
from tuner.display.view import HOVER, View
from tuner.formatting import Units, after_comma, label, long_text, number
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import Measurement, PowerSample, ProbeRecord
from tuner.workload.records.trace import read_power

# The one look of every figure: colours, axes, hover labels and error bars.
#
# Colours are one colour-blind-safe palette (after Okabe & Ito, 2008) in two versions: figures are
# drawn in the light one, and `DARK` says what each colour becomes on a dark page. Text that a user
# or a script wrote is escaped here, because Plotly reads tags in hover labels.


if TYPE_CHECKING:
    import plotly.graph_objects as go

TEXT, MUTED, GRID, PAPER, FAINT = "#1f2933", "#5b6773", "#e3e7eb", "#ffffff", "#8e99a4"
BLUE, ORANGE, GREEN, PURPLE, OCHRE = "#0072b2", "#d55e00", "#007a59", "#a8528a", "#8a6500"

#: What each colour of a figure becomes on a dark page.
DARK: Mapping[str, str] = {
    TEXT: "#e6e9ec",
    MUTED: "#a3adb8",
    GRID: "#2c343d",
    PAPER: "#161b21",
    FAINT: "#95a1ad",
    BLUE: "#56b4e9",
    ORANGE: "#ff9250",
    GREEN: "#35c99d",
    PURPLE: "#e6a3c8",
    OCHRE: "#e6c229",
}
SERIES = (BLUE, ORANGE, GREEN, PURPLE, OCHRE, MUTED)
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
#: Beyond this ratio of the largest to the smallest value an axis is logarithmic.
_LOG_RATIO = 6.0


class Axis:
    """The range, kind and ticks of one axis around the values that it must show.

    Args:
        soft: ends of intervals and constraints, shown as far as they take at most about half of
            the axis.
    """

    def __init__(self, values: Iterable[float], soft: Iterable[float] = ()) -> None:
        finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        self.log = low > 0 and high / low > _LOG_RATIO
        span = (high - low) or abs(high) * 0.2 or 1.0
        for value in soft:
            if not math.isfinite(value) or (self.log and value <= 0):
                continue
            if low - 0.6 * span <= value < low:
                low = value
            elif high < value <= high + 0.6 * span:
                high = value
        if self.log:
            pad = 0.06 * math.log10(high / low)
            self.low, self.high = low / 10**pad, high * 10**pad
        else:
            pad = 0.07 * ((high - low) or span)
            self.low, self.high = low - pad, high + pad
            if min(finite) >= 0:
                self.low = max(self.low, 0.0)

    def holds(self, value: float) -> bool:
        """Return True if the axis shows this value."""
        return self.low <= value <= self.high

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, 0 at its low end and 1 at its high one."""
        low, high = self.at(self.low), self.at(self.high)
        return (self.at(value) - low) / (high - low)

    def at(self, value: float) -> float:
        """Return the position of an annotation for Plotly: the logarithm on a logarithmic axis."""
        return math.log10(value) if self.log else value

    def layout(self) -> dict[str, Any]:
        """Return the axis's range and ticks as Plotly's layout."""
        if not self.log:
            return {"range": [self.low, self.high]}
        steps: tuple[float, ...] = (1, 1.5, 2, 3, 5, 7) if self.high / self.low < 20 else (1, 2, 5)
        if self.high / self.low > 500:
            steps = (1,)
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        ticks = [s * 10.0**d for d in range(first, last + 1) for s in steps]
        ticks = [t for t in ticks if self.holds(t)]
        return {
            "type": "log",
            "range": [math.log10(self.low), math.log10(self.high)],
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [f"{t:,.10g}" for t in ticks],
        }


def empty_figure(
    x_title: str, y_title: str, x: Mapping[str, Any], y: Mapping[str, Any]
) -> go.Figure:
    """Return a figure in the common style, without traces."""
    import plotly.graph_objects as go

    axis = {
        **{"gridcolor": GRID, "linecolor": MUTED, "tickcolor": GRID, "zeroline": False},
        **{"automargin": True, "ticks": "outside", "tickfont": {"color": MUTED, "size": 12}},
        **{"separatethousands": True, "exponentformat": "none"},
    }
    title = {"standoff": 10, "font": {"size": 13, "color": TEXT}}
    font = {"family": _FONT, "size": 13, "color": TEXT}
    hover = {"bgcolor": PAPER, "bordercolor": MUTED, "align": "left", "font": {**font, "size": 12}}
    corner = {"x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    return go.Figure(
        layout={
            **{"template": "none", "font": font, "paper_bgcolor": PAPER, "plot_bgcolor": PAPER},
            "margin": {"l": 12, "r": 18, "t": 12, "b": 12},
            **{"hovermode": "closest", "hoverlabel": hover},
            "legend": {"orientation": "h", **corner, "font": {"size": 12}},
            "xaxis": {**axis, "title": {"text": x_title, **title}, **x},
            "yaxis": {**axis, "title": {"text": y_title, **title}, **y},
        }
    )


def translucent(colour: str) -> str:
    """Return the colour at an opacity of about a sixth, for fills over a grid and other bands."""
    # Older releases of plotly do not take eight hexadecimal digits.
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def dark_palette() -> dict[str, str]:
    """Map each colour of a figure, and its translucent form, to its colour on a dark page."""
    fills = {translucent(light): translucent(dark) for light, dark in DARK.items()}
    return {**DARK, **fills}


def wrapped(text: str, width: int = 46) -> str:
    """Escaped text in lines, for a hover label."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, width)) or "default"


def scatter_trace(
    x: Sequence[Any], y: Sequence[Any], *, name: str = "", hover: Sequence[str] = (), **style: Any
) -> dict[str, Any]:
    """Return a trace of lines, markers or both, by which of `line` and `marker` is given.

    It is in the legend if it is named, and has hover labels if there are any.
    """
    trace = {"mode": "+".join(f"{each}s" for each in ("line", "marker") if each in style), **style}
    trace |= {"name": name} if name else {"showlegend": False}
    trace |= {"hoverinfo": "text", "hovertext": hover} if hover else {"hoverinfo": "skip"}
    return {"type": "scatter", "x": x, "y": y, **trace}


def add_small_text(figure: go.Figure, text: str, place: Mapping[str, Any], size: int = 11) -> None:
    """Write a muted text into the plot, at Plotly's position of an annotation."""
    figure.add_annotation(text=text, showarrow=False, font={"size": size, "color": MUTED}, **place)


def _hover(view: View, point: Point, heading: str) -> str:
    figures = []
    for column in HOVER:
        estimated = label(point.meter.mark) if column.metered else ""
        below = column.below(view, point)
        figures.append(f"{column.heading} {column.text(view, point)}{estimated}")
        figures[-1] += f" [{below}]" if below else ""
    lines = [
        f"<b>{html.escape(heading)}</b>",
        wrapped(long_text(point.configuration)),
        *figures,
        wrapped(point.how_measured),
        *(wrapped(flag) for flag in point.flags),
    ]
    return "<br>".join(lines)


def error_bars(
    values: Sequence[float], intervals: Iterable[Sequence[float]], colour: str, thickness: float = 1
) -> dict[str, Any]:
    """Return the error bars of values with these intervals; an end that is unknown has none."""

    def length(value: float) -> float:
        return max(value, 0.0) if math.isfinite(value) else 0.0

    ends = [(v - low, high - v) for v, (low, high) in zip(values, intervals, strict=True)]
    return {
        **{"type": "data", "symmetric": False, "color": colour, "thickness": thickness, "width": 0},
        "array": [length(above) for _, above in ends],
        "arrayminus": [length(below) for below, _ in ends],
    }


def points_trace(
    view: View,
    points: Sequence[Point],
    name: str,
    heading: str,
    marker: Mapping[str, Any],
    intervals: bool = True,
) -> dict[str, Any]:
    """Return a scatter trace of these points in time and energy to solution."""
    units = view.units
    x, y = (list(values) for values in zip(*map(units.place, points), strict=True))
    hover = [_hover(view, p, heading) for p in points]
    trace = scatter_trace(x, y, name=name, hover=hover, marker=dict(marker))
    if intervals:
        colour = marker["line"]["color"] if "line" in marker else marker["color"]
        times = ([end / units.s for end in p.time_interval_s] for p in points)
        energies = ([end / units.kJ for end in p.energy_interval_kJ] for p in points)
        trace["error_x"] = error_bars(x, times, colour)
        trace["error_y"] = error_bars(y, energies, colour)
    return trace


# A probe's power over time: its launch, its windows, and the phases of a step.
#
# The timeline is the meter's sampled power, which only draws the picture; every energy comes from
# the counter at the windows' boundaries. Phases are the training program's own marks, where it made
# any (as in Figure 4 of the study of multimodal training on GH200, whose steps show their parts
# so).


if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Approximate limit on the points of a drawn timeline: the least and the most power of each of half
#: as many spans, so that no peak is lost and the page stays small.
_MOST_POINTS = 1200
#: The phase in which the ranks stand at a window's boundary; it belongs to no step.
BOUNDARY = "boundary"


@dataclass(frozen=True)
class Timeline:
    """Recording of a probe: its samples, and (seconds since its start, phase that begins then)."""

    record: ProbeRecord
    samples: tuple[PowerSample, ...]
    phases: tuple[tuple[float, str], ...] = ()


def read_timeline(run_dir: Path | None, record: ProbeRecord) -> Timeline | None:
    """Return the power samples and phase marks of a probe; None where none were kept."""
    if run_dir is None:
        return None
    path = Path(run_dir) / "trace" / "power" / f"{record.request.probe_id}.csv.gz"
    if not path.is_file():
        return None
    samples, phases = read_power(path)
    return Timeline(record, tuple(samples), tuple(phases)) if len(samples) > 1 else None


def shown_timelines(
    result: Answer, records: Sequence[ProbeRecord]
) -> tuple[dict[str, Timeline], tuple[str, ...]]:
    """Return the timelines of the choice's longest probe and of the baseline's, as "best" and
    "baseline", and one sentence for each file that was left out because it cannot be read."""
    shown: dict[str, Timeline] = {}
    taken: set[str] = set()
    left_out: dict[str, str] = {}
    for name, point in (("best", result.best), ("baseline", result.baseline)):
        if point is None:
            continue
        probes = [
            r
            for r in records
            if r.request.launch == point.configuration.launch
            and any(m.live == point.configuration.live for m in r.measurements)
        ]
        for record in sorted(probes, key=lambda r: -len(r.measurements)):
            probe_id = record.request.probe_id
            if probe_id in taken or probe_id in left_out:
                continue
            try:
                timeline = read_timeline(result.run_dir, record)
            except InputError as error:
                left_out[probe_id] = f"The power of probe {probe_id} is left out: {error}."
                continue
            if timeline is not None:
                taken.add(probe_id)
                shown[name] = timeline
                break
    return shown, tuple(left_out.values())


def thinned(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Thin the line to about `_MOST_POINTS` points and keep each of its peaks and troughs."""
    if len(times) <= _MOST_POINTS:
        return times, values
    size = math.ceil(2 * len(times) / _MOST_POINTS)
    kept: list[int] = []
    for start in range(0, len(times), size):
        span = range(start, min(start + size, len(times)))
        kept += sorted({min(span, key=values.__getitem__), max(span, key=values.__getitem__)})
    return [times[i] for i in kept], [values[i] for i in kept]


def _band(x0: float, x1: float, colour: str, opacity: float) -> dict[str, Any]:
    return {
        **{"type": "rect", "xref": "x", "x0": x0, "x1": x1, "yref": "y domain", "y0": 0, "y1": 1},
        **{"fillcolor": colour, "opacity": opacity, "line": {"width": 0}, "layer": "below"},
    }


def _empty(timeline: Timeline, start_s: float, end_s: float) -> go.Figure:
    power = f"Power (W{after_comma(timeline.record.meter.mark)})"
    time = "Seconds since the probe's start"
    return empty_figure(time, power, {"range": [start_s, end_s]}, {"rangemode": "tozero"})


def _line(timeline: Timeline, name: str, colour: str, until_s: float) -> dict[str, Any]:
    pairs = [(s.time_s, s.power_W) for s in timeline.samples if s.time_s <= until_s]
    pairs = [(t, w) for t, w in pairs if math.isfinite(w)]
    x, y = thinned([t for t, _ in pairs], [w for _, w in pairs])
    times, watts = [round(t, 3) for t in x], [round(w, 2) for w in y]
    trace = scatter_trace(times, watts, name=name, line={"color": colour, "width": 1.3})
    hover = "%{x:.2f} s<br>%{y:,.4~g} W<extra>" + html.escape(name) + "</extra>"
    return {**trace, "hoverinfo": None, "hovertemplate": hover}


def timeline_figure(timeline: Timeline) -> go.Figure:
    """Draw the power over the whole probe, the windows shaded and named by their live setting."""
    record = timeline.record
    meter = record.meter
    end_s = max(timeline.samples[-1].time_s, record.wall_s)
    figure = _empty(timeline, 0, end_s)
    main = f"{meter.scope} ({meter.name})"
    figure.add_trace(_line(timeline, main, BLUE, end_s))
    shapes = []
    crowded = len(record.measurements) > 4
    for number_, m in enumerate(record.measurements, 1):
        shapes.append(_band(m.started_s, m.started_s + m.window_s, BLUE, 0.11))
        name = " ".join(map(str, m.live.values())) if crowded else m.live.short if m.live else ""
        text = name or f"window {number_}"
        middle_s = m.started_s + m.window_s / 2
        place = {"xref": "x", "x": middle_s, "yref": "y domain", "y": 0.02, "yanchor": "bottom"}
        add_small_text(figure, html.escape(text), place)
        mean = (
            f"window {html.escape(text)}: mean {number(m.power_W)} W"
            f"{label(meter.mark)}, {m.steps} steps of {number(m.step_time_s)} s"
        )
        ends = [m.started_s, m.started_s + m.window_s]
        dotted = {"color": TEXT, "width": 1.5, "dash": "dot"}
        figure.add_trace(scatter_trace(ends, [m.power_W] * 2, hover=[mean] * 2, line=dotted))
    figure.update_layout(shapes=shapes, showlegend=False)
    if record.idle_W is not None:
        figure.add_hline(y=record.idle_W, line={"color": FAINT, "width": 1, "dash": "dash"})
        at = {"xref": "x domain", "x": 1, "xanchor": "right", "yref": "y"}
        paper = {"y": record.idle_W, "yanchor": "bottom", "bgcolor": PAPER, "opacity": 0.85}
        add_small_text(figure, f"idle {number(record.idle_W)} W", {**at, **paper})
    return figure


def _window_with_marks(timeline: Timeline) -> Measurement | None:
    # The last window in which the program marked phases.
    times = [t for t, name in timeline.phases if name != BOUNDARY]
    for m in reversed(timeline.record.measurements):
        first = bisect.bisect_left(times, m.started_s)
        if bisect.bisect_right(times, m.started_s + m.window_s) - first > 1:
            return m
    return None


def _spans(timeline: Timeline, start_s: float, end_s: float) -> list[tuple[float, float, str]]:
    """(begin, end, phase) of each phase between two times, without those at a boundary."""
    marks = [*timeline.phases, (math.inf, BOUNDARY)]
    return [
        (max(begin, start_s), min(end, end_s), name)
        for (begin, name), (end, _) in itertools.pairwise(marks)
        if name != BOUNDARY and begin < end_s and end > start_s
    ]


def phase_names(timeline: Timeline) -> tuple[str, ...]:
    """Return the phases in the order of their first mark."""
    return tuple(dict.fromkeys(name for _, name in timeline.phases if name != BOUNDARY))


def phase_means(timeline: Timeline) -> list[tuple[str, float, float]]:
    """(phase, seconds a step, mean sampled power W) of the last window with marks, in order.

    Power is NaN where no sample fell into the phase; seconds are the record's own `phases_s`.
    """
    window = _window_with_marks(timeline)
    if window is None or not window.phases_s:
        return []
    times = [s.time_s for s in timeline.samples]
    sums: dict[str, list[float]] = {}
    for begin, end, name in _spans(timeline, window.started_s, window.started_s + window.window_s):
        low, high = bisect.bisect_left(times, begin), bisect.bisect_left(times, end)
        sums.setdefault(name, []).extend(s.power_W for s in timeline.samples[low:high])
    order = phase_names(timeline)
    return [
        (name, seconds, math.fsum(sums[name]) / len(sums[name]) if sums.get(name) else math.nan)
        for name, seconds in sorted(
            window.phases_s.items(), key=lambda pair: (*order, pair[0]).index(pair[0])
        )
        if name != BOUNDARY
    ]


if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Characters of a line below the axis on a phone.
_NARROW = 36


def front_figure(result: Answer) -> go.Figure | None:
    """Return energy against time: today, the recommendation, the front and the limits.

    Dominated and predicted points and the band in which the true front lies are in the legend
    alone until they are asked for. None where nothing was measured.
    """
    every = {p.configuration: p for p in (*result.points, *result.front_points)}
    advice = result.recommendation
    named = [p for p in (advice.point, advice.promising) if p is not None] if advice else []
    for point in (result.baseline, *named):
        if point is not None:
            every.setdefault(point.configuration, point)
    if not every:
        return None
    view = View(result)
    units = view.units
    every |= {p.configuration: p for p in result.predicted if p.configuration not in every}
    front = sorted(result.front_points, key=lambda p: p.time_to_solution_s)
    shown = [p for p in (*front, *named, result.baseline) if p]
    x_axis, y_axis = _axes(result, units, shown, shown or list(every.values()))
    figure = empty_figure(
        f"Time to solution ({units.time})",
        f"Energy to solution ({units.energy}{after_comma(view.mark)})",
        x_axis.layout(),
        y_axis.layout(),
    )
    _add_band(figure, result, units, x_axis)
    _add_hidden_points(
        figure, view, [p for c, p in every.items() if c not in view.front], x_axis, y_axis
    )
    _add_front(figure, view, front)
    for point in result.compared:
        marker = {"color": ORANGE, "size": 11, "symbol": "diamond"}
        figure.add_trace(points_trace(view, [point], "today", "Today", marker))
    for point in named:
        word = view.role(point)
        ring = {"width": 2.5, "color": GREEN if word == "recommended" else PURPLE}
        marker = {"color": "rgba(0,0,0,0)", "size": 19, "symbol": "circle", "line": ring}
        trace = points_trace(view, [point], word, word.capitalize(), marker, False)
        figure.add_trace(trace)
    _add_percent_of_today(figure, result, units, x_axis, y_axis)
    figure.update_layout(legend=_legend_corner(shown, units, x_axis, y_axis))
    outside = _add_constraints(figure, result, units, x_axis, y_axis)
    if outside:  # below the axis, where no label of a line or a point can be
        lines = textwrap.wrap("outside this view: " + ", ".join(outside), _NARROW)
        title = figure.layout.xaxis.title
        title.text += "".join(f'<br><span style="color:{MUTED}">{line}</span>' for line in lines)
    return figure


def _axes(
    result: Answer, units: Units, shown: Sequence[Point], inside: Sequence[Point]
) -> tuple[Axis, Axis]:
    # Axes that hold all points inside, and the intervals of the points shown, limits and the band
    # as far as they are near.
    limit_kJ, limit_s = result.limits.budget_kJ, result.limits.deadline_s
    band = result.attainment or Attainment((), (), (), (), 0)
    times_s = [t for p in shown for t in p.time_interval_s]
    energies_kJ = [e for p in shown for e in p.energy_interval_kJ]
    times_s += [limit_s] if limit_s else []
    energies_kJ += [limit_kJ] if limit_kJ else []
    energies_kJ += [*band.energy_kJ_10, *band.energy_kJ_90]
    return (
        Axis((units.place(p)[0] for p in inside), [t / units.s for t in times_s]),
        Axis((units.place(p)[1] for p in inside), [e / units.kJ for e in energies_kJ]),
    )


def _add_hidden_points(
    figure: go.Figure, view: View, points: Sequence[Point], x_axis: Axis, y_axis: Axis
) -> None:
    # Points that are not on the front, in the legend alone until they are asked for.
    dominated = [point for point in points if point.windows]
    predicted = [point for point in points if not point.windows]
    if dominated:
        marker = {"color": FAINT, "size": 6, "opacity": 0.55}
        places = map(view.units.place, dominated)
        far = sum(not (x_axis.holds(time) and y_axis.holds(energy)) for time, energy in places)
        name = "dominated points" + (f" ({far} of them outside this view)" if far else "")
        trace = points_trace(view, dominated, name, "Dominated", marker, False)
        figure.add_trace({**trace, "visible": "legendonly"})
    if predicted:
        # Of an open symbol the marker's own colour draws the edge.
        marker = {"color": PURPLE, "size": 8, "symbol": "circle-open", "line": {"width": 1.5}}
        trace = points_trace(view, predicted, "points never tried", "Predicted", marker, False)
        figure.add_trace({**trace, "visible": "legendonly"})


def _add_front(figure: go.Figure, view: View, front: Sequence[Point]) -> None:
    if len(front) > 1:
        stairs = {"shape": "hv", "color": BLUE, "width": 1.5}
        x, y = (list(values) for values in zip(*map(view.units.place, front), strict=True))
        figure.add_trace(scatter_trace(x, y, line=stairs))
    kinds = (("measured", "front", "circle"), ("predicted", "front, predicted", "circle-open"))
    for source, name, symbol in kinds:
        some = [p for p in front if p.source == source]
        if some:
            marker = {"color": BLUE, "size": 9, "symbol": symbol}
            figure.add_trace(points_trace(view, some, name, "On the front", marker))


def _add_band(figure: go.Figure, result: Answer, units: Units, x_axis: Axis) -> None:
    # The band of the true front is between its 10 % and 90 % attainment surfaces.
    band = result.attainment
    if band is None or len(band.time_s) < 2 or len(result.front_points) < 3:
        return
    columns = (band.time_s, band.energy_kJ_10, band.energy_kJ_50, band.energy_kJ_90)
    costed = [
        [time_s / units.s, *(energy / units.kJ for energy in energies)]
        for time_s, *energies in zip(*columns, strict=True)
        if all(math.isfinite(v) for v in energies) and time_s / units.s <= x_axis.high
    ]
    if len(costed) < 2:
        return
    times, low, middle, high = (
        [round(v, 6) for v in column] for column in zip(*costed, strict=True)
    )
    edge = {"shape": "hv", "width": 0, "color": BLUE}
    hidden = {"visible": "legendonly"}
    figure.add_trace(scatter_trace(times, high, line=edge, **hidden))
    fill = {"fill": "tonexty", "fillcolor": translucent(BLUE)}
    name = "80 % band of the true front"
    figure.add_trace(scatter_trace(times, low, name=name, line=edge, **fill, **hidden))
    dotted = {"shape": "hv", "width": 1, "color": BLUE, "dash": "dot"}
    figure.add_trace(scatter_trace(times, middle, name="its median", line=dotted, **hidden))


def _add_percent_of_today(
    figure: go.Figure, result: Answer, units: Units, x_axis: Axis, y_axis: Axis
) -> None:
    # Axes at the top and the right tell the change against today in per cent.
    today = result.baseline
    if today is None:
        return
    time, energy = units.place(today)
    for along, axis, value, side in (("x", x_axis, time, "top"), ("y", y_axis, energy, "right")):
        if axis.log or not value > 0:
            return
        layout = {
            **{"overlaying": along, "side": side, "anchor": "y2" if along == "x" else "x2"},
            "range": [100 * (end / value - 1) for end in (axis.low, axis.high)],
            **{"tickformat": "+.3~g", "ticksuffix": " %", "tickmode": "auto", "nticks": 6},
            **{"tickfont": {"color": MUTED, "size": 11}, "showgrid": False, "zeroline": False},
            "automargin": True,
        }
        figure.update_layout({f"{along}axis2": layout})
    # An axis is drawn where a trace is on it.
    empty = {"x": [None], "y": [None], "xaxis": "x2", "yaxis": "y2", "showlegend": False}
    figure.add_trace({"type": "scatter", "hoverinfo": "skip", **empty})


def _legend_corner(
    shown: Sequence[Point], units: Units, x_axis: Axis, y_axis: Axis
) -> dict[str, Any]:
    # The corner with the fewest points: mostly next to the origin, as nothing dominates the front.
    drawn = map(units.place, shown)
    places = [(x_axis.share(time), y_axis.share(energy)) for time, energy in drawn]

    def crowd(corner: tuple[int, int]) -> int:
        return sum(abs(x - corner[0]) < 0.45 and abs(y - corner[1]) < 0.4 for x, y in places)

    x, y = min(((0, 0), (1, 1), (0, 1), (1, 0)), key=crowd)
    return {
        "orientation": "v",
        "x": x,
        "xanchor": ("left", "right")[x],
        "y": y,
        "yanchor": ("bottom", "top")[y],
        "bgcolor": "rgba(0,0,0,0)",
    }


def _add_constraints(
    figure: go.Figure, result: Answer, units: Units, x_axis: Axis, y_axis: Axis
) -> list[str]:
    # Lines of what was asked, each with its label; those outside the view are returned.
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    outside: list[str] = []

    def limit(text: str, value: float, axis: Axis, along: str, across: str, **label: Any) -> None:
        # A line at the value of the axis `along` across the other axis, labelled at its end.
        if not axis.holds(value):
            outside.append(text)
            return
        whole = {f"{across}ref": f"{across} domain"}
        figure.add_shape(
            type="line",
            line=line,
            **whole,
            **{f"{across}0": 0, f"{across}1": 1, f"{along}ref": along},
            **{f"{along}0": value, f"{along}1": value},
        )
        at = {"xanchor": "right", across: 1, f"{along}ref": along, along: axis.at(value)}
        add_small_text(figure, text, {**whole, **at, **label}, 12)

    if budget := result.limits.budget_kJ:
        text = f"budget {units.energy_text(budget)}"
        limit(text, budget / units.kJ, y_axis, "y", "x", yanchor="bottom")
    if deadline := result.limits.deadline_s:
        text = f"deadline {units.time_text(deadline)}"
        # At the top, but where the budget's label is, in the upper right: then at the bottom.
        level, at = (budget / units.kJ if budget else y_axis.low), deadline / units.s
        taken = y_axis.holds(level) and y_axis.share(level) > 0.5 and x_axis.share(at) > 0.5
        end = {"y": 0, "yanchor": "bottom"} if taken else {"y": 1, "yanchor": "top"}
        limit(text, at, x_axis, "x", "y", textangle=-90, **end)
    if cap := result.limits.power_cap_W:
        # Average power is energy over time, so a cap is a line through the origin: E = cap x t.
        text = f"power cap {number(cap)} W"
        times = [x_axis.low + (x_axis.high - x_axis.low) * i / 60 for i in range(61)]
        energies = [cap * t * units.s / 1000 / units.kJ for t in times]
        if any(y_axis.holds(e) for e in energies):
            dotted = {**line, "dash": "dot"}
            figure.add_trace(scatter_trace(times, energies, name=text, line=dotted))
        else:
            outside.append(text)
    return outside
