"""Safe exploration under a cap on peak power: what would probably exceed it is not probed.

The highest power sample of a window is its mean power times a factor, learned from the windows of
the study. With the surrogates' posterior of the mean this gives the probability that a candidate
exceeds the cap; candidates above `MOST_PROBABLE` are left out. Their standard deviations are as
wide as those of intervals and fall with the distance to what was measured, so the search goes from
the safe side inwards (Sui et al. 2015, "Safe exploration for optimization with Gaussian processes",
ICML).

A power limit bounds the mean power of its devices, whatever the surrogates believe of settings far
from what was measured. Before there is enough to fit them, the safest candidate may always be
probed: after the baseline alone, every other one is expected to draw what the baseline does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm

from tuner.models.surrogate.surrogates import Posterior
from tuner.models.surrogate.ties import TOLERANCE
from tuner.search.acquisition import CandidateView
from tuner.search_spaces.configuration import Configuration

#: Probability of exceeding the cap above which a candidate is not probed; if every one is above it,
#: as after the first windows, the safest is probed up to the second figure.
MOST_PROBABLE, SAFEST_PROBABLE = 0.1, 0.5
#: Prior of the log of peak over mean power, which counts as this number of windows: its mean and
#: standard deviation. An assumption, which a few windows outweigh.
PRIOR_MEAN, PRIOR_SD, PRIOR_WINDOWS = 0.12, 0.06, 2.0


def most_power_W(configuration: Configuration) -> float:
    """Return the mean power that the devices' power limit permits; infinite without a limit."""
    limit = configuration.get("power_limit_W")
    # One limit for each stage bounds it, too, and is left to the surrogates.
    return float(limit) * configuration.world_size if isinstance(limit, int | float) else math.inf


@dataclass(frozen=True)
class PeakLimit:
    """Cap on peak power, and what peaks are expected to be.

    Attributes:
        log_ratio: mean of the log of peak over mean power.
        log_ratio_sd: its standard deviation from configuration to configuration.
        limits_hold: whether `most_power_W` bounds the power: that of the devices alone is metered.
    """

    cap_W: float
    log_ratio: float
    log_ratio_sd: float
    limits_hold: bool = False

    @classmethod
    def of(cls, cap_W: float, peaks_W: Sequence[float], means_W: Sequence[float]) -> PeakLimit:
        """Return the limit with the ratio of these windows, shrunk towards the prior."""
        ratios = np.log(np.asarray(peaks_W, float) / np.asarray(means_W, float))
        whole = PRIOR_WINDOWS + len(ratios)
        mean = (PRIOR_WINDOWS * PRIOR_MEAN + ratios.sum()) / whole
        squares = PRIOR_WINDOWS * (PRIOR_SD**2 + (PRIOR_MEAN - mean) ** 2)
        squares += float(((ratios - mean) ** 2).sum())
        return cls(cap_W, float(mean), math.sqrt(squares / whole))

    @property
    def mean_power_W(self) -> float:
        """Mean power at which the peak is expected to be the cap."""
        return self.cap_W / math.exp(self.log_ratio)

    def probability_above(self, posterior: Posterior, widening: float) -> np.ndarray:
        """Return the probability that each configuration exceeds the cap, (n,).

        Args:
            widening: factor of the standard deviations of log power (`Surrogates.widening`).
        """
        sd = np.hypot(widening * posterior.log_power_std, self.log_ratio_sd)
        above = posterior.log_power + self.log_ratio - math.log(self.cap_W)
        return np.asarray(norm.cdf(above / sd))

    def safe(
        self,
        candidates: CandidateView,
        widening: float,
        configurations: Sequence[Configuration],
        levels: np.ndarray | None = None,
    ) -> CandidateView | None:
        """Return the candidates that may be probed; None if there are none.

        Args:
            levels: how high the settings of each are, (n,), to choose by while too little is
                measured to fit the surrogates; None once it is enough.
        """
        risk = self.probability_above(candidates.posterior, widening)
        most_W = np.full(len(risk), math.inf)
        if self.limits_hold:
            most_W = np.array([most_power_W(each) for each in configurations])
            above = np.log(most_W) + self.log_ratio - math.log(self.cap_W)
            risk = np.minimum(risk, norm.cdf(above / self.log_ratio_sd))
        kept = np.flatnonzero(risk <= max(MOST_PROBABLE, float(risk.min())) + TOLERANCE)
        if risk.min() > SAFEST_PROBABLE:
            if levels is None:
                return None
            kept = np.lexsort((levels, most_W))[:1]
        return replace(
            candidates,
            members=candidates.members[kept],
            rows=candidates.rows[kept],
            launch_of=candidates.launch_of[kept],
            posterior=candidates.posterior[kept],
            chances=candidates.chances[kept],
            gpus=candidates.gpus[kept],
        )
