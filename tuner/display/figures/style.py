"""The one look of every figure: colours, axes, hover labels and error bars.

Colours are one colour-blind-safe palette (after Okabe & Ito, 2008) in two versions: figures are
drawn in the light one, and `DARK` says what each colour becomes on a dark page. Text that a user
or a script wrote is escaped here, because Plotly reads tags in hover labels.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.answer.parts import Point
from tuner.display.columns import HOVER
from tuner.display.view import View
from tuner.formatting import label, long_text

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
