"""Simple regret of a search: the hypervolume that the measured configurations still miss.

Of a question (`tuner.search.question`) it is what the answer among the measured ones loses, a
difference of logs. A search may end when the regret is small in nearly every joint draw of the
surrogates (Makarova et al. 2022, "Automatic termination for hyperparameter optimization", AutoML;
Wilson 2024, "Stopping Bayesian optimization with probabilistic regret bounds", NeurIPS). The draws
are as wide as the intervals of the answer, because the plain posterior is too sure of itself after
a few measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.gaussian_process import LEAST_ROWS
from tuner.models.surrogate.surrogates import Surrogates
from tuner.models.surrogate.ties import TOLERANCE, ranked
from tuner.pareto import improvement, reference_point
from tuner.search.acquisition import FAR, CandidateView, normal_draws
from tuner.search.log_regret import LogRegret
from tuner.search.question import Question

#: With fewer measurements no regret is estimated: the hyperparameters are not fitted yet.
LEAST_MEASUREMENTS = LEAST_ROWS
#: Number of joint draws, and the largest number of measured and of open candidates in each: those
#: nearest to the front, and those with the most to gain. More of them would not fit in a proposal's
#: time; the rest is dominated in nearly every draw.
DRAWS, MOST_CANDIDATES = 128, 128
#: Noise beyond this share of a drawn front's hypervolume counts as this much. A front that is drawn
#: small has a noise of more than itself, and no regret can exceed that: searches of noisy tables
#: ended after a few windows with the whole front missing. Half and double of it were not tried.
MOST_NOISE = 0.1
#: Open candidates are ranked by the improvement at this many standard deviations below the mean.
OPTIMISM_SD = 2.0


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
    # (draws,). A gain in time alone is converted at the front's own rate.
    saving: np.ndarray
    of_answer: bool = False  # True if it is the regret of a question's answer

    def probability_above(self, share: float) -> float:
        """Return the probability that more is missing than this share and the noise."""
        return float(np.mean(self.missing > self._least(share)))

    def detection_threshold(self, share: float) -> float:
        """Return what `probability_above` compares with, the median of the draws."""
        return float(np.median(self._least(share)))

    def _least(self, share: float) -> np.ndarray:
        return np.clip(self.noise, share, max(MOST_NOISE, share))


class RegretModel:
    """Regret over joint draws of fitted surrogates."""

    def __init__(self, surrogates: Surrogates, seed: int) -> None:
        self._surrogates, self._seed = surrogates, seed
        self._normals: np.ndarray | None = None

    def estimate(
        self,
        front: CandidateView,
        still_open: CandidateView,
        question: Question | None = None,
    ) -> RegretEstimate:
        """Return the regret of the candidates that are measured or in flight."""
        near, promising = self._relevant(front, still_open, question)
        if self._normals is None:
            self._normals = normal_draws(DRAWS, 2 * MOST_CANDIDATES, self._seed)
        both = np.append(front.members[near], still_open.members[promising])
        log_t, log_p = self._surrogates.sample(both, self._normals, wide=True)
        fits = np.ones((DRAWS, len(both)), dtype=bool)
        fits[:, len(near) :] = still_open.counting(promising, DRAWS)
        if question is not None:
            points = np.stack([log_t + log_p, log_t], axis=-1)
            gpus = np.append(front.gpus[near], still_open.gpus[promising])
            return self._of_answer(question, points, fits, gpus, len(near))
        log_t += np.where(fits, 0.0, FAR)
        regret = LogRegret(log_t + log_p, log_t, measured=len(near))
        noise = regret.noise(*self._surrogates.noise())
        return RegretEstimate(regret.missing, noise, regret.saving)

    def _of_answer(
        self, question: Question, points: np.ndarray, fits: np.ndarray, gpus: np.ndarray, known: int
    ) -> RegretEstimate:
        energy, time = points[..., 0], points[..., 1]
        worst = question.objective(energy, time, gpus).max(axis=1, keepdims=True)
        losses = np.where(fits, question.loss(energy, time, gpus, worst), np.inf)
        missing = losses[:, :known].min(axis=1) - losses.min(axis=1)
        time_sd, power_sd = self._surrogates.noise()
        saving = missing
        of_energy, of_time = question.weights
        if not of_energy:
            ends = [reference_point(each[fit]) for each, fit in zip(points, fits, strict=True)]
            least = np.where(fits[..., None], points, np.inf).min(axis=1)
            energy_range, time_range = (np.array(ends) - least).T
            saving = missing * energy_range / time_range
        noise_sd = math.hypot((of_energy + of_time) * time_sd, of_energy * power_sd)
        return RegretEstimate(missing, np.full(DRAWS, noise_sd), saving, of_answer=True)

    def _relevant(
        self, front: CandidateView, still_open: CandidateView, question: Question | None
    ) -> tuple[np.ndarray, np.ndarray]:
        posterior, (wide_t, wide_p) = still_open.posterior, self._surrogates.widening
        best_t = posterior.log_time - OPTIMISM_SD * wide_t * posterior.log_time_std
        best_p = posterior.log_power - OPTIMISM_SD * wide_p * posterior.log_power_std
        points, best = front.points, np.column_stack([best_t + best_p, best_t])
        if question is None:
            reference = np.maximum(points.max(axis=0), best.max(axis=0)) + 1.0
            promise = improvement(points, best[:, 0], best[:, 1], reference)
            near = front.nearest_to_front(MOST_CANDIDATES)
        else:
            gpus = np.append(front.gpus, still_open.gpus)
            energy, time = np.vstack([points, best]).T
            worst = float(question.objective(energy, time, gpus).max())
            losses = question.loss(energy, time, gpus, worst)
            promise = losses[: len(points)].min() - losses[len(points) :]
            near = np.sort(ranked(-losses[: len(points)])[:MOST_CANDIDATES])
        order = np.sort(ranked(promise)[:MOST_CANDIDATES])
        return near, order[promise[order] > TOLERANCE]
