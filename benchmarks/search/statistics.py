"""Medians, quartiles and tests over the runs, and the figures that are published of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.figures import Figure
from benchmarks.search.names import OURS, STOCK
from benchmarks.search.runner import Run
from benchmarks.search.samplers import WITH_MODELS


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return float(np.quantile(list(values), share))


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = np.quantile(list(values), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def spread(values: Iterable[float], digits: int = 0) -> str:
    """Format as "median (quartile to quartile)"."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def figure_name(name: str) -> str:
    """Return a sampler's name as part of a figure's."""
    return name.replace("-", "_").replace("+", "_with_").replace("/", "_")


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def never_found(groups: Iterable[Sequence[Run]], begin: str = "", end: str = "") -> Figure:
    """Print and return in how many groups one of ours never found the front, whatever it paid."""
    missed = sum(not all(run.found for run in runs) for runs in groups)
    print(f"  groups in which a search by {OURS} never found the front: {missed}")
    return Figure(f"{begin}groups_never_found{end}", missed, "count")


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Correct p-values by Holm's step-down procedure (Holm 1979)."""
    corrected: dict[str, float] = {}
    worst = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = worst
    return corrected


def significance(medians: dict[str, list[float]]) -> dict[str, float]:
    """Return p-values of our joules against each other sampler's, paired by group.

    Wilcoxon signed rank on the logs, two-sided, Holm-corrected. Empty with fewer than two groups.
    """
    from scipy.stats import wilcoxon

    ours = np.log(medians[OURS])
    p_values = {}
    for name, theirs in medians.items():
        difference = ours - np.log(theirs)
        if name != OURS and len(difference) > 1 and difference.any():
            p_values[name] = float(wilcoxon(difference).pvalue)
    return holm(p_values)


def last_figures(
    medians: dict[str, list[float]],
    counted: dict[str, list[float]],
    over_oracle: dict[str, list[float]],
) -> list[Figure]:
    """Compare ours with the rest.

    A group's best stock sampler is the one with the fewest joules in it (for measurements, the
    fewest measurements).
    """
    stock = [name for name in medians if name in STOCK]
    figures = []
    if "random" in medians:
        worst = max(a / b for a, b in zip(medians[OURS], medians["random"], strict=True))
        figures.append(Figure("worst_group_over_random", worst, "ratio"))
    if "tpe" in medians:
        ratios = [a / b for a, b in zip(medians[OURS], medians["tpe"], strict=True)]
        figures.append(Figure("ratio_tpe", geometric_mean(ratios), "ratio"))
    if stock:
        for title, values in (("measurements_best_stock", counted), ("best_stock", medians)):
            best = [min(group) for group in zip(*(values[name] for name in stock), strict=True)]
            ratios = [a / b for a, b in zip(values[OURS], best, strict=True)]
            figures.append(Figure(f"ratio_{title}", geometric_mean(ratios), "ratio"))
            if WITH_MODELS in values:
                ratios = [a / b for a, b in zip(values[WITH_MODELS], best, strict=True)]
                name = f"with_models_ratio_{title}"
                figures.append(Figure(name, geometric_mean(ratios), "ratio"))
    return [*figures, Figure("ratio_oracle", geometric_mean(over_oracle[OURS]), "ratio")]
