"""Error of predicted peak memory, learned from the peaks and failures of probes.

The true peak is the prediction times exp(b + e): b the same for every configuration of a study, e
its own. A measured peak gives b + e; a probe that ran out of memory, or ran without a recorded
peak, shows on which side of the capacity it was. The posterior of b is kept on a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

#: Standard deviations of log(true / predicted) before any probe: common to a study, and a
#: configuration's own. Held out, Sailor's plans are within 9 % and half of them within 2 %
#: (`benchmarks.published`); another framework's own share may be off by more.
MEMORY_BIAS, MEMORY_SPREAD = 0.15, 0.05
#: The same where a program is alone on one device, without collectives and their buffers: with a
#: configuration's own share that is 0.10. The peaks of 30 reports (`benchmarks.fit --reports`) are
#: off by 0.09, root mean square of the log, and by 0.11 with one that is off by 0.39.
ALONE_BIAS = 0.09
#: Share of out-of-memory failures that do not depend on the device's predicted peak: an estimate.
#: It keeps one unexplained failure from excluding every configuration.
OTHER_CAUSE = 0.02


#: A candidate's predicted peak is at most this factor times the device's memory; the largest error
#: of predicted memory in `benchmarks.published` is below it.
CANDIDATE_FACTOR = 1.15
#: Of very many launches, those with a lower probability of fitting come last.
REFUSED_BELOW = 0.05
#: The first launches of a search, and predictions for more GPUs, take only configurations that fit
#: with at least this probability, if there are any.
LIKELY_FROM = 0.5


#: Values of the common error whose probabilities are kept.
_GRID = np.linspace(-6 * MEMORY_BIAS, 6 * MEMORY_BIAS, 601)


@cache
def _fitting_by_room() -> tuple[np.ndarray, np.ndarray]:
    """Return logs of capacity over prediction, and the probability of fitting by each error."""
    edge = float(-_GRID[0]) + 6 * MEMORY_SPREAD
    at = np.linspace(-edge, edge, 801)
    return at, np.exp(_log_probability((at[:, None] - _GRID) / MEMORY_SPREAD))


def _log_probability(z: np.ndarray) -> np.ndarray:
    # SciPy takes a while to import, which the start of a script does not wait for.
    from scipy.special import log_ndtr

    return np.asarray(log_ndtr(z))


class MemoryMargin:
    """Posterior of the error of predicted memory.

    Args:
        bias: standard deviation of the common error before any probe.
    """

    def __init__(self, capacity_bytes: float, *, bias: float = MEMORY_BIAS) -> None:
        self.capacity_bytes = float(capacity_bytes)
        self._grid = _GRID
        self._log_density = -0.5 * (self._grid / bias) ** 2

    def _above(self, predicted_bytes: float) -> np.ndarray:
        room = np.log(self.capacity_bytes / predicted_bytes)
        return np.asarray((room - self._grid) / MEMORY_SPREAD)

    def measured(self, predicted_bytes: float, peak_bytes: float) -> None:
        off = np.log(peak_bytes / predicted_bytes)
        self._log_density -= 0.5 * ((off - self._grid) / MEMORY_SPREAD) ** 2

    def ran_out(self, predicted_bytes: float) -> None:
        """Update with an out-of-memory failure: the peak was above the capacity."""
        explained = _log_probability(-self._above(predicted_bytes))
        self._log_density += np.logaddexp(np.log(OTHER_CAUSE), np.log1p(-OTHER_CAUSE) + explained)

    def fitted(self, predicted_bytes: float) -> None:
        """Update with a probe that ran without a recorded peak: it was below the capacity."""
        self._log_density += _log_probability(self._above(predicted_bytes))

    def _weights(self) -> np.ndarray:
        weights = np.exp(self._log_density - self._log_density.max())
        return np.asarray(weights / weights.sum())

    @property
    def factor(self) -> tuple[float, float]:
        """Median of true over predicted, and relative standard deviation of the common part."""
        weights = self._weights()
        mean = float(weights @ self._grid)
        return float(np.exp(mean)), float(np.sqrt(weights @ (self._grid - mean) ** 2))

    def probability_of_fitting(self, predicted_bytes: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the probability that each true peak is within the capacity, shape (n,)."""
        room = np.log(self.capacity_bytes / np.asarray(predicted_bytes, dtype=float))
        # A smooth function of the room, interpolated from a grid, so that 100,000 cost little.
        at, given_bias = _fitting_by_room()
        return np.asarray(np.interp(room, at, given_bias @ self._weights()))


def learned_margin(
    capacity_bytes: float, predicted_bytes: np.ndarray, peaks: Mapping[int, float]
) -> MemoryMargin:
    """Return the margin given the probes of a study.

    Args:
        peaks: measured peak in bytes by the number of the configuration; infinite if it ran out of
            memory, NaN if it ran without a recorded peak.
    """
    margin = MemoryMargin(capacity_bytes)
    for number, peak in peaks.items():
        predicted = float(predicted_bytes[number])
        if np.isnan(peak):
            margin.fitted(predicted)
        elif np.isinf(peak):
            margin.ran_out(predicted)
        else:
            margin.measured(predicted, peak)
    return margin
