"""Joint draws of the measured candidates and of the open ones that matter.

One set of draws tells what a probe is worth and what the search still misses, of the front or of a
question (`tuner.search.regret`). Each draw is at hyperparameters of its own, and they are wider
than the plain posterior, which is too sure of itself after a few measurements.
"""

from __future__ import annotations

from functools import cached_property, reduce

import numpy as np

from tuner.models.surrogate.gaussian_process import quasi_normal
from tuner.models.surrogate.surrogates import Surrogates
from tuner.models.surrogate.ties import ranked
from tuner.pareto import improvement
from tuner.search.candidate_pool import CandidateView
from tuner.search.question import Question

#: Share of the widening of the answer's intervals: a search pays for each doubt.
WIDENED = 0.5
#: Number of draws.
DRAWS = 128
#: Measured candidates that are drawn, those nearest to the front; open ones, those with the most to
#: gain, a whole launch at a time; and settings of one launch, at most.
MEASURED_DRAWN, OPEN_DRAWN, LIVE_DRAWN = 64, 128, 64
#: What an open candidate may gain is judged this number of standard deviations below its mean.
OPTIMISM_SD = 2.0
#: Added to the logarithms of a candidate in draws in which it does not count.
FAR = 50.0


class JointDraws:
    """Draws of log energy and log time, (draws, measured + open).

    In a draw in which a candidate does not count, because it hardly fits or hardly runs as set, it
    is far behind.

    Attributes:
        measured, still_open: the candidates that are drawn.
        count: number of the measured ones.
    """

    def __init__(
        self,
        surrogates: Surrogates,
        measured: CandidateView,
        still_open: CandidateView,
        question: Question | None = None,
        *,
        running_launch: int | None = None,
        seed: int = 0,
    ) -> None:
        self.surrogates, self.question = surrogates, question
        promise, near = _promise(surrogates, measured, still_open, question)
        self.measured = measured[np.sort(ranked(near)[:MEASURED_DRAWN])]
        self.still_open = still_open[_whole_launches(still_open.launch_of, promise, running_launch)]
        self.count = len(self.measured.members)
        both = np.append(self.measured.members, self.still_open.members)
        width = MEASURED_DRAWN + OPEN_DRAWN + LIVE_DRAWN
        normals = quasi_normal(DRAWS, 2 * width, seed).reshape(DRAWS, 2, width)
        time, power = surrogates.sample(both, normals, widened=WIDENED)
        rough = np.random.default_rng(seed).standard_normal((2, DRAWS, OPEN_DRAWN + LIVE_DRAWN))
        for log, error in zip((time, power), rough, strict=True):
            log[:, self.count :] += error[:, : time.shape[1] - self.count] * self.still_open.rough
        gpus = np.append(self.measured.gpus, self.still_open.gpus)
        logs = time + power, time
        # Of each figure that is to be low, or of the question's loss.
        self._logs = logs if question is None else (question.loss(*logs, gpus),)
        for log in self._logs:
            log[:, self.count :] += FAR * ~self.still_open.counting(DRAWS)

    @cached_property
    def worse(self) -> np.ndarray:
        """Log factor by which each candidate is worse than each open one, in energy or time or for
        the question, (draws, open, measured + open)."""
        each = (log[:, None, :] - log[:, self.count :, None] for log in self._logs)
        return np.asarray(reduce(np.maximum, each))

    @cached_property
    def losses(self) -> np.ndarray:
        """Log factor by which the best measured candidate is worse than each open one, at least 0,
        (draws, open)."""
        return np.maximum(self.worse[:, :, : self.count].min(axis=2), 0.0)

    @cached_property
    def regret(self) -> np.ndarray:
        """Regret of each draw, (draws,)."""
        return np.asarray(self.losses.max(axis=1))


def _promise(
    surrogates: Surrogates,
    measured: CandidateView,
    still_open: CandidateView,
    question: Question | None,
) -> tuple[np.ndarray, np.ndarray]:
    # Possible gain of each open candidate; nearness of measured ones to the front or the answer.
    posterior, (wide_t, wide_p) = still_open.posterior, surrogates.widening
    best_t = posterior.log_time - OPTIMISM_SD * wide_t * posterior.log_time_std
    best_p = posterior.log_power - OPTIMISM_SD * wide_p * posterior.log_power_std
    points, best = measured.points, np.column_stack([best_t + best_p, best_t])
    if question is None:
        reference = np.maximum(points.max(axis=0), best.max(axis=0)) + 1.0
        gains = improvement(points, best[:, 0], best[:, 1], reference)
        behind = (points[:, None] - points[None]).max(axis=2).max(axis=1)
        return gains * still_open.chances, -behind
    gpus = np.append(measured.gpus, still_open.gpus)
    energy, time = np.vstack([points, best]).T
    losses = question.loss(energy, time, gpus)
    of_measured, possible = np.split(losses, [len(points)])
    gains = np.maximum(of_measured.min() - possible, 0.0)
    return gains * still_open.chances, -of_measured


def _whole_launches(
    launch_of: np.ndarray, promise: np.ndarray, running_launch: int | None
) -> np.ndarray:
    # In the order of the candidates: a candidate's draws do not change with its rank.
    order = ranked(promise)
    _, first = np.unique(launch_of[order], return_index=True)
    launches = launch_of[order][np.sort(first)]
    drawn: list[np.ndarray] = []
    count = 0
    for launch in sorted(launches, key=lambda each: each != running_launch):
        rows = order[launch_of[order] == launch][:LIVE_DRAWN]
        if count + len(rows) <= OPEN_DRAWN + (launch == running_launch) * LIVE_DRAWN:
            drawn.append(rows)
            count += len(rows)
        if count >= OPEN_DRAWN:
            break
    return np.sort(np.concatenate(drawn))
