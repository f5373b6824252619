"""Simple regret of a search: the hypervolume that the measured configurations still miss.

In each joint draw of the surrogates over measured and open candidates, the regret is the share of
the drawn front's hypervolume that the measured ones miss. A search may end when the regret is small
in nearly every draw (Makarova et al. 2022, "Automatic termination for hyperparameter optimization",
AutoML; Wilson 2024, "Stopping Bayesian optimization with probabilistic regret bounds", NeurIPS).
The draws are as wide as the intervals of the answer (`Surrogates.sample_wide`), because the plain
posterior is too sure of itself after a few measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.gaussian_process import LEAST_ROWS
from tuner.models.surrogate.surrogates import Surrogates
from tuner.pareto import hypervolume, hypervolume_sd, improvement, reference_point
from tuner.search.acquisition import CandidateView, FrontEstimate, normal_draws
from tuner.search_spaces.configuration import Configuration

__all__ = ["LEAST_MEASUREMENTS", "RegretEstimate", "RegretModel"]

#: With fewer measurements no regret is estimated: the hyperparameters are not fitted yet.
LEAST_MEASUREMENTS = LEAST_ROWS
#: Number of joint draws, and the largest number of measured and of open candidates in each: those
#: nearest to the front, and those with the most to gain. More of them would not fit in a proposal's
#: time; the rest is dominated in nearly every draw.
DRAWS, MOST_CANDIDATES = 128, 128
#: Open candidates are ranked by the improvement at this many standard deviations below the mean.
OPTIMISM_SD = 2.0


@dataclass(frozen=True)
class RegretEstimate:
    """Draws of the simple regret.

    Attributes:
        missing: share of the drawn front's hypervolume that the measured candidates miss, (draws,).
        noise: standard deviation of the drawn front's hypervolume, as a share of it, if each of its
            points were measured by one window, (draws,). A smaller share cannot be told.
        saving: reduction of log energy, averaged over the drawn front's range of times, that is
            left to find, (draws,). A gain in time alone is converted at the front's own rate.
    """

    missing: np.ndarray
    noise: np.ndarray
    saving: np.ndarray

    def probability_above(self, share: float) -> float:
        """Return the probability that more is missing than this share and the noise."""
        return float(np.mean(self.missing > np.maximum(share, self.noise)))


class RegretModel:
    """Regret over joint draws of fitted surrogates.

    Args:
        surrogates: fitted to the measurements.
        seed: of the draws.
    """

    def __init__(self, surrogates: Surrogates, seed: int) -> None:
        self._surrogates, self._seed = surrogates, seed
        self._normals: np.ndarray | None = None

    def estimate(
        self,
        front: FrontEstimate,
        still_open: Sequence[Configuration],
        view: CandidateView,
    ) -> RegretEstimate:
        """Return the regret of the configurations that are measured or in flight.

        Args:
            front: what is measured or in flight, at least one.
            still_open: the configurations of `view`, in its order.
            view: the candidates that may be proposed.
        """
        near, promising = self._relevant(front, view)
        if self._normals is None:
            self._normals = normal_draws(DRAWS, 2 * MOST_CANDIDATES, self._seed)
        both = [*(front.configurations[i] for i in near), *(still_open[i] for i in promising)]
        log_t, log_p = self._surrogates.sample_wide(both, self._normals)
        points = np.stack([log_t + log_p, log_t], axis=-1)
        fits = self._fitting(view, promising, len(near))
        noise_sd = self._surrogates.noise()
        missing, noise, saving = np.empty((3, DRAWS))
        for draw in range(DRAWS):
            every = points[draw, fits[draw]]
            reference = reference_point(every)
            whole = hypervolume(every, reference)
            left = max(whole - hypervolume(points[draw, : len(near)], reference), 0.0)
            missing[draw] = left / whole
            noise[draw] = hypervolume_sd(every, reference, *noise_sd) / whole
            saving[draw] = left / float(reference[1] - every[:, 1].min())
        return RegretEstimate(missing, noise, saving)

    def _relevant(self, front: FrontEstimate, view: CandidateView) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the chosen and of the open candidates that can matter."""
        posterior, (wide_t, wide_p) = view.posterior, self._surrogates.widening
        best_t = posterior.log_time - OPTIMISM_SD * wide_t * posterior.log_time_std
        best_p = posterior.log_power - OPTIMISM_SD * wide_p * posterior.log_power_std
        best = np.column_stack([best_t + best_p, best_t])
        reference = np.maximum(front.points.max(axis=0), best.max(axis=0)) + 1.0
        promise = improvement(front.points, best[:, 0], best[:, 1], reference)
        order = np.argsort(-promise, kind="stable")[:MOST_CANDIDATES]
        return front.nearest(MOST_CANDIDATES), order[promise[order] > 0]

    def _fitting(self, view: CandidateView, rows: np.ndarray, measured: int) -> np.ndarray:
        """Return a mask of the candidates that fit in memory in each draw, measured ones first.

        The settings of a launch fit together or not at all.
        """
        fits = np.ones((DRAWS, measured + len(rows)), dtype=bool)
        if (view.fits[rows] < 1).any():
            launches, launch = np.unique(view.launch_of[rows], return_inverse=True)
            uniform = np.random.default_rng(self._seed).random((DRAWS, len(launches)))
            fits[:, measured:] = uniform[:, launch] < view.fits[rows]
        return fits
