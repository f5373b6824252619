"""A probe's power over time as a small SVG, for viewers that run no script.

The dashboard shows artifacts as images. This draws the same as `power.timeline_figure` in plain
SVG: the line, the windows, and the ends of both axes.
"""

from __future__ import annotations

from html import escape

from tuner.display.figures.power import Timeline, thinned
from tuner.display.figures.style import BLUE, MUTED, PAPER, TEXT
from tuner.formatting import label, number

__all__ = ["timeline_svg"]

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 40, 34


def timeline_svg(timeline: Timeline) -> str:
    """Draw power in watts over seconds since the probe's start, as SVG text."""
    record = timeline.record
    times = [sample.time_s for sample in timeline.samples]
    powers = [sample.power_W for sample in timeline.samples]
    end_s = max(times[-1], record.wall_s) or 1.0
    top_W = 1.05 * max(powers) or 1.0

    def x(time_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * time_s / end_s

    def y(power_W: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * power_W / top_W

    def text(at_x: float, at_y: float, said: str, anchor: str, colour: str = MUTED) -> str:
        return (
            f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" '
            f'fill="{colour}">{escape(said)}</text>'
        )

    title = f"{record.request.probe_id}: {record.request.launch.short}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        text(_LEFT, 16, title[:110], "start", TEXT),
        text(_LEFT, 32, f"power (W){label(record.meter.mark)} over seconds", "start"),
    ]
    tall = _HEIGHT - _TOP - _BOTTOM
    for m in record.measurements:
        left, wide = x(m.started_s), x(m.started_s + m.window_s) - x(m.started_s)
        parts.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{wide:.1f}" height="{tall}" '
            f'fill="{BLUE}" opacity="0.12"/>'
        )
        if m.live:
            values = " ".join(map(str, m.live.values()))
            parts.append(text(left + wide / 2, _HEIGHT - _BOTTOM - 5, values, "middle"))
    line = " ".join(f"{x(t):.1f},{y(w):.1f}" for t, w in zip(*thinned(times, powers), strict=True))
    low, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts += [
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.2"/>',
        f'<path d="M{_LEFT} {_TOP}V{low}H{right}" fill="none" stroke="{MUTED}"/>',
        text(_LEFT - 6, y(0) + 4, "0", "end"),
        text(_LEFT - 6, y(max(powers)) + 4, number(max(powers)), "end"),
        text(_LEFT, low + 18, "0", "middle"),
        text(right, low + 18, f"{number(end_s)} s", "end"),
        "</svg>",
    ]
    return "\n".join(parts)
