"""A probe's power over time: its launch, its windows, and the phases of a step.

The timeline is the meter's sampled power, which only draws the picture; every energy comes from the
counter at the windows' boundaries. Phases are the training program's own marks, where it made any
(as in Figure 4 of the study of multimodal training on GH200, whose steps show their parts so).
"""

from __future__ import annotations

import bisect
import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.answer.answer import Answer
from tuner.display.figures.style import (
    BLUE,
    FAINT,
    PAPER,
    TEXT,
    add_small_text,
    empty_figure,
    scatter_trace,
)
from tuner.formatting import after_comma, label, number
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import Measurement, PowerSample, ProbeRecord
from tuner.workload.records.trace import read_power

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
