"""Acquisition for a question: expected improvement of its answer per joule.

A probe is worth the expected fall of the least loss (`Question.loss`): constrained expected
improvement (Gardner et al. 2014, "Bayesian optimization with inequality constraints", ICML), over
draws that move together. One window is planned at a time; a launch is worth its best setting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.surrogates import Surrogates
from tuner.models.surrogate.ties import first_best
from tuner.problem.probe_cost import ProbeCost
from tuner.search.acquisition import CandidateView, FrontEstimate, Scored
from tuner.search.question import Question


@dataclass(frozen=True)
class AnswerAcquisition:
    """Expected improvement of the answer per joule."""

    surrogates: Surrogates
    cost: ProbeCost
    question: Question
    cost_weight: float
    draws: np.ndarray  # `normal_draws`, (draws, 2, 1)

    def best(
        self, front: FrontEstimate, candidates: CandidateView, running_launch: int | None = None
    ) -> Scored:
        """Return the window with the most expected improvement per joule."""
        posterior, question = candidates.posterior, self.question
        mean_e, mean_t = posterior.log_energy, posterior.log_time
        objective = question.objective(mean_e, mean_t, candidates.gpus)
        known_e, known_t = front.points.T
        known = question.objective(known_e, known_t, front.gpus)
        worst = float(np.append(known, objective).max())
        least = question.loss(known_e, known_t, front.gpus, worst).min()
        gain = np.maximum(least - self._losses(candidates, worst), 0.0).mean(axis=0)
        launches = candidates.launch_of != running_launch
        launch_J = np.where(launches, self.cost.launch_J(posterior.power_W), 0.0)
        joules = launch_J + self.cost.visit_J(posterior.power_W, posterior.step_time_s)
        score = gain * candidates.chances / joules**self.cost_weight
        best = first_best(score)
        if not gain.any():
            likely = candidates.likely
            losses = question.loss(mean_e, mean_t, candidates.gpus, worst)
            best = int(likely[first_best(-losses[likely])])
        return Scored(
            members=(int(candidates.members[best]),),
            score=float(score[best]),
            cost_J=float(joules[best]),
            first_J=float(joules[best]),
            expected_gain=float(gain[best]),
        )

    def _losses(self, candidates: CandidateView, worst: float) -> np.ndarray:
        # Widened for few measurements, as intervals are: a search that is sure of the wrong side of
        # a limit does not look at the other.
        posterior, (wide_t, wide_p) = candidates.posterior, self.surrogates.widening
        log_t = posterior.log_time + self.draws[:, 0] * wide_t * posterior.log_time_std
        log_p = posterior.log_power + self.draws[:, 1] * wide_p * posterior.log_power_std
        return self.question.loss(log_t + log_p, log_t, candidates.gpus, worst)
