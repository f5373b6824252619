"""The anytime curves: hypervolume missing against joules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.search.runner import Run
from benchmarks.search.truth import WITHIN


def anytime_figure(runs: Sequence[Run], oracles: dict[str, float]) -> Any:
    """Plot the share of the hypervolume missing against joules over the oracle's.

    Median over seeds, one panel a group, a line a sampler, a band between the quartiles.
    """
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    groups = list(oracles)
    samplers = list(dict.fromkeys(run.sampler for run in runs))
    columns = min(3, len(groups))
    figure = make_subplots(
        rows=math.ceil(len(groups) / columns),
        cols=columns,
        subplot_titles=[g if len(g) < 46 else f"{g[:22]}…{g[-22:]}" for g in groups],
    )
    for place, group in enumerate(groups):
        row, column = place // columns + 1, place % columns + 1
        for colour, sampler in zip(qualitative.D3 * 3, samplers, strict=False):
            mine = [run for run in runs if run.problem.group == group and run.sampler == sampler]
            end = max(run.curve[-1][0] for run in mine) / oracles[group]
            grid = np.geomspace(0.05, max(end, 0.06), 120)
            steps = np.array([_curve_at(run.curve, grid * oracles[group]) for run in mine])
            low, middle, high = np.quantile(100 * steps, [0.25, 0.5, 0.75], axis=0)
            figure.add_scatter(
                x=np.concatenate([grid, grid[::-1]]),
                y=np.concatenate([high, low[::-1]]),
                fill="toself",
                fillcolor=colour,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                row=row,
                col=column,
            )
            figure.add_scatter(
                x=grid,
                y=middle,
                name=sampler,
                legendgroup=sampler,
                showlegend=place == 0,
                line={"color": colour, "width": 2, "shape": "hv"},
                row=row,
                col=column,
            )
        figure.add_vline(x=1.0, line={"dash": "dot", "color": "grey"}, row=row, col=column)
        figure.add_hline(y=100 * WITHIN, line={"dash": "dot", "color": "grey"}, row=row, col=column)
    figure.update_xaxes(type="log", title_text="probing energy / the oracle's", dtick=1)
    figure.update_yaxes(type="log", title_text="hypervolume missing, %", range=[-0.7, 2.05])
    figure.update_layout(
        template="plotly_white",
        height=330 * math.ceil(len(groups) / columns) + 80,
        width=400 * columns + 120,
        legend={"orientation": "h", "y": 1.0, "yanchor": "top", "yref": "container", "x": 0},
        margin={"t": 110},
    )
    return figure


def _curve_at(curve: Sequence[tuple[float, float]], kJ: np.ndarray) -> np.ndarray:
    """Return the share missing after each energy; all of it before the first probe ends."""
    spent = np.array([point[0] for point in curve])
    missing = np.concatenate([[1.0], [point[1] for point in curve]])
    return np.asarray(np.maximum(missing[np.searchsorted(spent, kJ, side="right")], 1e-3))
