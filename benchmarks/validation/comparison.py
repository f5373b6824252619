"""Result of a comparison, and the layout of its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.figures import Figure


@dataclass(frozen=True)
class Comparison:
    """One comparison with something published.

    Attributes:
        name: stem of its plot's file.
        title: what was compared.
        lines: its table and its sentences.
        figures: its figures, for scripts.
        summary: its result and what that is worth, one sentence.
        plot: a Plotly figure; None where there is nothing to draw.
    """

    name: str
    title: str
    lines: Sequence[str]
    figures: Sequence[Figure] = field(default_factory=list)
    summary: str = ""
    plot: Any = None


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Aligned columns."""
    cells = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def quantiles(errors: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Median, 90th percentile and worst of absolute errors."""
    size = np.abs(np.asarray(errors, dtype=float))
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(size.max())


def error_plot(
    title: str,
    series: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[str]]],
    *,
    what: str,
) -> Any:
    """How far each prediction is off, in per cent, over what was measured.

    Args:
        series: (name, measured, predicted, labels) each.
        what: the quantity with its unit.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for level, dash in ((0, "solid"), (10, "dot"), (-10, "dot")):
        figure.add_hline(y=level, line={"dash": dash, "color": "#999", "width": 1})
    for name, measured, predicted, labels in series:
        off = [100 * (p / m - 1) for m, p in zip(measured, predicted, strict=True)]
        figure.add_scatter(
            x=list(measured),
            y=off,
            mode="markers",
            name=name,
            text=list(labels),
            marker={"size": 9, "opacity": 0.75},
            hovertemplate="%{text}<br>measured %{x:.4g}<br>off by %{y:+.1f} %<extra></extra>",
        )
    figure.update_layout(
        title=title,
        template="plotly_white",
        xaxis={"title": f"measured {what}", "type": "log", "dtick": "D2"},
        yaxis={"title": "predicted over measured, less one (%)"},
        width=900,
        height=600,
    )
    return figure
