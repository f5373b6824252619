"""Quantiles and means over the runs, and groups never found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.figures import Figure
from benchmarks.search.names import OURS
from benchmarks.search.runner import Run


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return float(np.quantile(list(values), share))


def figure_name(name: str) -> str:
    """Return a sampler's name as part of a figure's."""
    return name.replace("-", "_").replace("+", "_with_").replace("/", "_")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def never_found(groups: Iterable[Sequence[Run]], end: str) -> Figure:
    """Print and return in how many groups one of ours never found the front, whatever it paid."""
    missed = sum(not all(run.found for run in runs) for runs in groups)
    print(f"  groups in which a search by {OURS} never found the front: {missed}")
    return Figure(f"groups_never_found{end}", missed, "count")
