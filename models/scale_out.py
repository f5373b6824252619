"""From the few GPUs at hand to the many: the models corrected by probes, with honest intervals.

The log of measured over predicted is a line in the doublings of the GPU count, a + b log2(n / n0),
with a Gaussian prior on both: a is how far the models are off here, b how much more per doubling.
Probes at one size tell a and nothing of b, so the interval widens with every doubling beyond them,
as far as the prior lets b go; probes at several sizes narrow it. A configuration's own share, which
no number of others tells, comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Corrected", "ScaleOut"]

#: Standard deviations of the log error before any probe: here, more per doubling of the GPUs, and a
#: configuration's own. Sailor's plans, each predicted without itself, are off by 3 % in the median
#: and 6 % at worst over 4 to 64 GPUs (`benchmarks.published`); power by 5 and 14 % on JUPITER.
HERE, PER_DOUBLING, OWN = 0.15, 0.03, 0.04
#: Two-sided 90 % quantile of the normal distribution.
Z90 = 1.6448536269514722


@dataclass(frozen=True)
class Corrected:
    """Corrected figures with their 90 % intervals; arrays of one shape."""

    median: np.ndarray
    low: np.ndarray
    high: np.ndarray


class ScaleOut:
    """The correction of one figure (step time, or power).

    Args:
        gpus: of each probe.
        predicted, measured: the figure, by the models and by the probe.

    Raises:
        ValueError: the three differ in length, or a figure is not above 0.
    """

    def __init__(
        self, gpus: Sequence[float], predicted: Sequence[float], measured: Sequence[float]
    ) -> None:
        n, p, m = (np.asarray(values, dtype=float) for values in (gpus, predicted, measured))
        if not len(n) == len(p) == len(m):
            raise ValueError("as many GPU counts, predictions and measurements are needed")
        if len(n) and min(n.min(), p.min(), m.min()) <= 0:
            raise ValueError("GPU counts, predictions and measurements must be above 0")
        # b counts from the middle of what was probed, where a is known best.
        self.centre = float(np.log2(n).mean()) if len(n) else 0.0
        rows = np.column_stack([np.ones(len(n)), np.log2(n) - self.centre])
        precision = np.diag([HERE**-2, PER_DOUBLING**-2]) + rows.T @ rows / OWN**2
        self._covariance = np.linalg.inv(precision)
        self._mean = self._covariance @ (rows.T @ np.log(m / p)) / OWN**2

    def correct(self, gpus: Sequence[float], predicted: Sequence[float] | np.ndarray) -> Corrected:
        """The figure at other sizes: the prediction, corrected, with its 90 % interval."""
        doublings = np.log2(np.asarray(gpus, dtype=float)) - self.centre
        rows = np.column_stack([np.ones(len(doublings)), doublings])
        off = rows @ self._mean
        spread = np.sqrt(np.einsum("ij,jk,ik->i", rows, self._covariance, rows) + OWN**2)
        median = np.asarray(predicted, dtype=float) * np.exp(off)
        return Corrected(median, median * np.exp(-Z90 * spread), median * np.exp(Z90 * spread))
