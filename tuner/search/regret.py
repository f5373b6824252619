"""Simple regret of a search: the hypervolume that the measured configurations still miss.

Of a question (`tuner.search.question`) it is what the answer among the measured ones loses, a
difference of logs. A search may end when the regret is small in nearly every joint draw of the
surrogates (Makarova et al. 2022, "Automatic termination for hyperparameter optimization", AutoML;
Wilson 2024, "Stopping Bayesian optimization with probabilistic regret bounds", NeurIPS).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.gaussian_process import LEAST_ROWS
from tuner.search.joint_draws import JointDraws

#: With fewer measurements no regret is estimated: the hyperparameters are not fitted yet.
LEAST_MEASUREMENTS = LEAST_ROWS
#: Noise beyond this share of a drawn front's hypervolume counts as this much. A front that is drawn
#: small has a noise of more than itself, and no regret can exceed that: searches of noisy tables
#: ended after a few windows with the whole front missing. Half and double of it were not tried.
MOST_NOISE = 0.1


@dataclass(frozen=True)
class RegretEstimate:
    """Draws of the simple regret."""

    # share of the drawn front's hypervolume that the measured candidates miss, (draws,); of a
    # question the log of the objective that their best loses to the best of all.
    missing: np.ndarray
    # standard deviation of the drawn front's hypervolume, as a share of it, if each of its points
    # were measured by one window, (draws,); of a question that of one window's objective. What is
    # smaller cannot be told.
    noise: np.ndarray
    # reduction of log energy, averaged over the drawn front's range of times, that is left to find,
    # (draws,). Of a question any gain counts as one of energy: it is one at the same power.
    saving: np.ndarray
    of_answer: bool = False  # True if it is the regret of a question's answer

    def probability_above(self, share: float) -> float:
        """Return the probability that more is missing than this share and the noise."""
        return float(np.mean(self.missing > self._least(share)))

    def detection_threshold(self, share: float) -> float:
        """Return the median of the draws, which `probability_above` compares."""
        return float(np.median(self._least(share)))

    def _least(self, share: float) -> np.ndarray:
        return np.clip(self.noise, share, max(MOST_NOISE, share))


def regret_of(drawn: JointDraws) -> RegretEstimate:
    """Return the regret of the candidates that are measured or in flight."""
    time_sd, power_sd = drawn.surrogates.noise()
    if drawn.question is None:
        front = drawn.front
        return RegretEstimate(front.missing, front.noise(time_sd, power_sd), front.saving)
    missing = drawn.answer_gains.max(axis=1)
    of_energy, of_time = drawn.question.weights
    noise_sd = math.hypot((of_energy + of_time) * time_sd, of_energy * power_sd)
    return RegretEstimate(missing, np.full(len(missing), noise_sd), missing, of_answer=True)
