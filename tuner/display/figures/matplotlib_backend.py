"""A Plotly figure of ours as a matplotlib figure, for papers.

The figures are drawn once, for Plotly; this translates what they use of it (lines, markers, bars,
error bars, filled bands, shaded spans, axes and their units), so that both backends show the same
data. Hover labels and annotations have no place on paper.
"""

from __future__ import annotations

import html
import importlib
import re
from typing import TYPE_CHECKING, Any

from tuner.search_spaces.errors import InputError

if TYPE_CHECKING:
    import matplotlib.figure
    import plotly.graph_objects as go

__all__ = ["on_paper"]

_MARKERS = {"circle": "o", "circle-open": "o", "diamond": "D", "square": "s"}
_MARKERS |= {"triangle-up": "^", "x": "x", "cross": "+"}
_DASHES = {"dash": "--", "dot": ":"}
#: Marker sizes are pixels there and points here; 96 pixels and 72 points are an inch.
_POINTS = 72 / 96


def _text(value: Any) -> str:
    """Return Plotly's text without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", " ", str(value or "")))


def _alpha(colour: str) -> Any:
    return "none" if colour.startswith("rgba(0,0,0,0") else colour


def _scatter(axes: Any, trace: dict[str, Any], below: Any) -> None:
    mode, line, marker = (
        trace.get("mode", "lines"),
        trace.get("line", {}),
        trace.get("marker", {}),
    )
    x, y = list(trace.get("x", ())), list(trace.get("y", ()))
    if not [value for value in x if value is not None]:
        x, y = [], []
    name = _text(trace.get("name")) if trace.get("showlegend", True) else "_nolegend_"
    step = line.get("shape") == "hv"
    if "fillcolor" in trace and below is not None:
        axes.fill_between(
            x, y, below, step="post" if step else None, color=trace["fillcolor"], lw=0, label=name
        )
        return
    if "lines" in mode and line.get("width", 1.5) > 0:
        axes.plot(
            x,
            y,
            color=line.get("color"),
            linestyle=_DASHES.get(line.get("dash", ""), "-"),
            linewidth=line.get("width", 1.5) * _POINTS,
            drawstyle="steps-post" if step else "default",
            label=name,
        )
        name = "_nolegend_"
    if "markers" in mode:
        colour = _alpha(marker.get("color", "black"))
        ring = marker.get("line", {})
        hollow = colour == "none" or str(marker.get("symbol", "")).endswith("-open")
        size = marker.get("size", 6)
        sizes = size if isinstance(size, list | tuple) else [size] * len(x)
        shape = {"edgecolors": ring.get("color", colour), "linewidths": ring.get("width", 0.8)}
        symbol = _MARKERS.get(marker.get("symbol", "circle"), "o")
        if symbol in "x+":
            shape = {"color": colour}
        else:
            shape["facecolors"] = "none" if hollow else colour
        axes.scatter(
            x,
            y,
            s=[(value * _POINTS) ** 2 for value in sizes],
            marker=symbol,
            alpha=marker.get("opacity"),
            label=name,
            zorder=3,
            **shape,
        )
    for axis in ("x", "y"):
        error = trace.get(f"error_{axis}")
        if error and x:
            pair = {f"{axis}err": [error["arrayminus"], error["array"]]}
            axes.errorbar(x, y, fmt="none", ecolor=error["color"], elinewidth=0.8, **pair)


def _bar(axes: Any, trace: dict[str, Any], at: int, of: int) -> None:
    flat = trace.get("orientation") == "h"
    places, values = (trace["y"], trace["x"]) if flat else (trace["x"], trace["y"])
    values = [value or 0.0 for value in values]
    look = {"color": trace["marker"]["color"], "label": _text(trace.get("name"))}
    if flat:
        axes.barh([_text(place) for place in places], values, **look)
    elif all(isinstance(place, int | float) for place in places):
        axes.bar(places, values, **look)
    else:
        width = 0.8 / of
        axes.bar(
            [i + width * (at - (of - 1) / 2) for i in range(len(places))], values, width, **look
        )
        axes.set_xticks(range(len(places)), [_text(place) for place in places], fontsize=7)


def _shape(axes: Any, shape: dict[str, Any]) -> None:
    line = shape.get("line", {})
    look = {"color": line.get("color"), "linestyle": _DASHES.get(line.get("dash", ""), "-")}
    if shape["type"] == "rect":
        colour, alpha = shape["fillcolor"], shape.get("opacity")
        axes.axvspan(shape["x0"], shape["x1"], color=colour, alpha=alpha, lw=0)
    elif shape.get("xref") == "x domain":
        axes.axhline(shape["y0"], linewidth=1, **look)
    else:
        axes.axvline(shape["x0"], linewidth=1, **look)


def on_paper(figure: go.Figure) -> matplotlib.figure.Figure:
    """Draw the figure with matplotlib: 6.4 by 4 inches, no backend chosen, ready for `savefig`.

    Raises:
        InputError: matplotlib is not installed; the extra `notebook` brings it.
    """
    try:
        made = importlib.import_module("matplotlib.figure").Figure(
            figsize=(6.4, 4.0), layout="constrained"
        )
    except ImportError as error:
        raise InputError(
            "matplotlib is not installed; install it with pip install 'joulefront[notebook]'"
        ) from error
    axes = made.add_subplot()
    given = figure.to_plotly_json()
    layout, below = given["layout"], None
    traces = [figure.data[i].to_plotly_json() for i in range(len(figure.data))]
    for shape in layout.get("shapes", ()):
        _shape(axes, shape)
    bars = [trace for trace in traces if trace["type"] == "bar"]
    for trace in traces:
        if trace["type"] == "bar":
            _bar(axes, trace, bars.index(trace), len(bars))
        else:
            _scatter(axes, trace, below)
            below = list(trace.get("y", ()))
    for side in ("x", "y"):
        axis = layout.get(f"{side}axis", {})
        title = str(axis.get("title", {}).get("text") or "")  # its first line is the quantity
        getattr(axes, f"set_{side}label")(_text(title.partition("<br>")[0]))
        span = axis.get("range")
        if axis.get("type") == "log":
            getattr(axes, f"set_{side}scale")("log")
            span = [10**end for end in span] if span else None
            ticks = (axis.get("tickvals"), axis.get("ticktext"))
            if ticks[0] is not None:
                getattr(axes, f"set_{side}ticks")(*ticks)
                getattr(axes, f"{side}axis").minorticks_off()
        if span and None not in span:
            getattr(axes, f"set_{side}lim")(*span)
        elif axis.get("rangemode") == "tozero":
            getattr(axes, f"set_{side}lim")(**{"left" if side == "x" else "bottom": 0})
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles and any(labels):
        axes.legend(fontsize=7, frameon=False)
    return made
