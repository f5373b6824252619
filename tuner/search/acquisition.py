"""Acquisition: expected fall of the log regret per joule, over launches with their live settings.

A launch is paid once, a further live setting only its window, so settings are added while they are
worth it (`tuner.search.log_regret.Sweep`). A running launch is extended for the windows alone, and
another launch is charged for coming back to it where settings of it are still missing. Expectations
are over fixed quasi-random joint draws of the surrogates, each at hyperparameters of its own.
Before there is enough to model, a few launches are spread over the space (`farthest`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, qmc

from tuner.models.surrogate.surrogates import Posterior, Surrogates
from tuner.models.surrogate.ties import first_best, ranked
from tuner.pareto import improvement, nondominated, reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.search.log_regret import LogRegret, Sweep
from tuner.search.question import Question

#: Number of draws that score single settings, and of draws that build a probe's sweep.
SINGLE_DRAWS, JOINT_DRAWS = 64, 128
#: Candidates that sweeps are built from, at most: whole launches, those with the best single
#: settings first, each with at most `LIVE_TRIED` settings.
CANDIDATES_TRIED, LIVE_TRIED = 128, 64
#: Chance from which a candidate is not left for last where nothing is worth anything.
LIKELY = 0.5
#: Added to the log time of a candidate in draws in which it does not count.
FAR = 50.0
#: Measured configurations that are drawn with them, at most: those nearest to the front.
MEASURED_TRIED = 64


@dataclass(frozen=True)
class Scored:
    """One probe and its score."""

    # indices into the candidates, all of one launch; the first is visited first.
    members: tuple[int, ...]
    # expected fall of the log regret per joule, with the joules of coming back to a launch that is
    # left for this one.
    score: float
    cost_J: float
    first_J: float
    expected_gain: float


@dataclass(frozen=True)
class CandidateView:
    """Candidates and what is expected of them: those that may be proposed, or those measured."""

    members: np.ndarray  # numbers of the candidates, (n,)
    launch_of: np.ndarray
    posterior: Posterior
    # probability that each fits in memory and that no rule leaves it out rightly, (n,). None is
    # closed by it: it weighs what a candidate is worth.
    chances: np.ndarray
    gpus: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> CandidateView:
        """Return the view of these rows alone."""
        return CandidateView(*(value[rows] for value in vars(self).values()))

    @property
    def points(self) -> np.ndarray:
        """Expected log energy and log time of each, (n, 2)."""
        return np.column_stack([self.posterior.log_energy, self.posterior.log_time])

    @property
    def likely(self) -> np.ndarray:
        """Rows of those with an even chance, or, if none has, with the best one."""
        return np.flatnonzero(self.chances >= min(LIKELY, self.chances.max()))

    def counting(self, rows: np.ndarray, draws: int, of: float | np.ndarray = 1.0) -> np.ndarray:
        """Return a mask of the draws in which each of these rows counts, (draws, rows)."""
        shares = (np.random.default_rng(0).permutation(draws) + 0.5) / draws
        return np.asarray(shares[:, None] * of < self.chances[rows])

    def nearest_to_front(self, count: int) -> np.ndarray:
        """Return the rows of the points nearest to the front, at most this number, sorted."""
        e, t = self.points.T
        behind = np.maximum(e[:, None] - e[None, :], t[:, None] - t[None, :]).max(axis=1)
        return np.sort(ranked(-behind)[:count])


def normal_draws(draws: int, width: int, seed: int) -> np.ndarray:
    """Return quasi-random standard normal draws (scrambled Sobol), (draws, 2, width)."""
    engine = qmc.Sobol(2 * width, scramble=True, seed=seed)
    uniform = np.clip(engine.random(draws), 1e-9, 1 - 1e-9)
    return np.asarray(norm.ppf(uniform)).reshape(draws, 2, width)


def search_reference(front: np.ndarray, posterior: Posterior) -> np.ndarray:
    """Return the reference point during the search: that of the predicted front, (2,).

    The front measured so far may be one point, whose nadir would deny all worth to the rest of the
    trade-off; the predicted means tell how far it reaches.
    """
    predicted = np.column_stack([posterior.log_energy, posterior.log_time])
    return np.maximum(reference_point(np.vstack([front, predicted])), reference_point(front))


@dataclass(frozen=True)
class ProbeAcquisition:
    """Expected fall of the log regret per joule of whole probes."""

    surrogates: Surrogates
    cost: ProbeCost
    max_live: int  # settings that one probe visits at most
    # `normal_draws` for single settings, (draws, 2, 1), and joint ones, (draws, 2,
    # `CANDIDATES_TRIED` + `LIVE_TRIED` + `MEASURED_TRIED`).
    draws: tuple[np.ndarray, np.ndarray]

    def best(
        self,
        front: CandidateView,
        candidates: CandidateView,
        running_launch: int | None = None,
        question: Question | None = None,
    ) -> Scored:
        """Return the probe that is worth the most per joule, or most for a question.

        `front` is what is measured or in flight.
        """
        if question is not None:
            answer = AnswerAcquisition(self.surrogates, self.cost, question, self.draws[0])
            return answer.best(front, candidates, running_launch)
        launches = self._promising(front, candidates, running_launch)
        tried = np.concatenate(launches)
        # The score of a launch is weighed by the best chance of its settings.
        chances = [float(candidates.chances[rows].max()) for rows in launches]
        best_of = np.repeat(chances, [len(rows) for rows in launches])
        counting = candidates.counting(tried, len(self.draws[1]), best_of)
        regret = self._regret(front, candidates.members[tried], counting)
        posterior = candidates.posterior
        launch_J = self.cost.launch_J(posterior.power_W)
        visit_J = self.cost.visit_J(posterior.power_W, posterior.step_time_s)
        sweeps, begin, return_J = [], 0, 0.0
        for rows in launches:
            columns = np.arange(begin, begin + len(rows))
            running = candidates.launch_of[rows[0]] == running_launch
            sweep = Sweep(regret, columns, launch_J[rows] * (not running), visit_J[rows])
            sweep.grow(self.max_live)
            if running:
                return_J = sweep.needed * float(launch_J[rows].min())
            else:
                sweep.begin_cheaply()
            sweeps.append(sweep)
            begin += len(rows)
        # A launch that ends the running one is charged for coming back as well.
        leaves = [candidates.launch_of[rows[0]] != running_launch for rows in launches]
        joules = np.array([sweep.cost_J for sweep in sweeps]) + return_J * np.array(leaves)
        values = np.array([sweep.value for sweep in sweeps]) * chances
        scores = values / np.maximum(joules, 1e-12)
        best = first_best(scores)
        if scores[best] <= 0:
            return self._nearest(front, candidates, running_launch)
        rows, sweep = launches[best], sweeps[best]
        visited = tuple(int(member) for member in candidates.members[rows[sweep.added]])
        score, gain = float(scores[best]), float(sweep.share.mean())
        return Scored(visited, score, sweep.cost_J, sweep.first_J, gain)

    def _promising(
        self, front: CandidateView, candidates: CandidateView, running_launch: int | None
    ) -> list[np.ndarray]:
        # In the order of the candidates: a candidate's draws do not change with its rank.
        posterior, launch_of = candidates.posterior, candidates.launch_of
        draws = self.draws[0]
        log_t = posterior.log_time + draws[:, 0] * posterior.log_time_std
        log_p = posterior.log_power + draws[:, 1] * posterior.log_power_std
        reference = search_reference(front.points, posterior)
        gains = improvement(_corners(front.points), log_t + log_p, log_t, reference).mean(axis=0)
        launch_J = np.where(launch_of == running_launch, 0.0, self.cost.launch_J(posterior.power_W))
        joules = launch_J + self.cost.visit_J(posterior.power_W, posterior.step_time_s)
        order = ranked(gains * candidates.chances / joules)
        _, places = np.unique(launch_of[order], return_index=True)
        launches: list[np.ndarray] = []
        count = 0
        for launch in launch_of[order][np.sort(places)]:
            if launch == running_launch or count < CANDIDATES_TRIED:
                rows = np.sort(order[launch_of[order] == launch][:LIVE_TRIED])
                if launch == running_launch or count + len(rows) <= CANDIDATES_TRIED:
                    launches.append(rows)
                count += len(rows)
            elif running_launch is None:
                break
        return sorted(launches, key=lambda rows: int(launch_of[rows[0]]))

    def _regret(self, front: CandidateView, tried: np.ndarray, counting: np.ndarray) -> LogRegret:
        near = front.nearest_to_front(MEASURED_TRIED)
        both = np.append(front.members[near], tried)
        log_t, log_p = self.surrogates.sample(both, self.draws[1], marginal=True)
        log_t[:, len(near) :] += np.where(counting, 0.0, FAR)
        return LogRegret(log_t + log_p, log_t, measured=len(near))

    def _nearest(
        self, front: CandidateView, candidates: CandidateView, running_launch: int | None
    ) -> Scored:
        # Nearest in standard deviations: of the nearer axis, from the corner that is farthest.
        all_of, corners = candidates.posterior, _corners(front.points)
        behind_e = (all_of.log_energy[:, None] - corners[:, 0]) / all_of.log_energy_std[:, None]
        behind_t = (all_of.log_time[:, None] - corners[:, 1]) / all_of.log_time_std[:, None]
        behind, likely = np.minimum(behind_e, behind_t).max(axis=1), candidates.likely
        best = int(likely[first_best(-behind[likely])])
        posterior = candidates.posterior[[best]]
        joules = float(self.cost.visit_J(posterior.power_W, posterior.step_time_s)[0])
        if candidates.launch_of[best] != running_launch:
            joules += float(self.cost.launch_J(posterior.power_W)[0])
        member = int(candidates.members[best])
        return Scored((member,), score=0.0, cost_J=joules, first_J=joules, expected_gain=0.0)


@dataclass(frozen=True)
class AnswerAcquisition:
    """Expected improvement of a question's answer per joule.

    A probe is worth the expected fall of the least loss (`Question.loss`): constrained expected
    improvement (Gardner et al. 2014, "Bayesian optimization with inequality constraints", ICML),
    over draws that move together. One window is planned at a time; a launch is worth its best
    setting.
    """

    surrogates: Surrogates
    cost: ProbeCost
    question: Question
    draws: np.ndarray  # `normal_draws`, (draws, 2, 1)

    def best(
        self, front: CandidateView, candidates: CandidateView, running_launch: int | None = None
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
        score = gain * candidates.chances / joules
        best = first_best(score)
        if not gain.any():
            likely = candidates.likely
            losses = question.loss(mean_e, mean_t, candidates.gpus, worst)
            best = int(likely[first_best(-losses[likely])])
        member, cost_J = int(candidates.members[best]), float(joules[best])
        return Scored((member,), float(score[best]), cost_J, cost_J, float(gain[best]))

    def _losses(self, candidates: CandidateView, worst: float) -> np.ndarray:
        # Widened for few measurements, as intervals are: a search that is sure of the wrong side of
        # a limit does not look at the other.
        posterior, (wide_t, wide_p) = candidates.posterior, self.surrogates.widening
        log_t = posterior.log_time + self.draws[:, 0] * wide_t * posterior.log_time_std
        log_p = posterior.log_power + self.draws[:, 1] * wide_p * posterior.log_power_std
        return self.question.loss(log_t + log_p, log_t, candidates.gpus, worst)


def _corners(points: np.ndarray) -> np.ndarray:
    return points[nondominated(points[:, 0], points[:, 1])]


def farthest(
    points: np.ndarray, chosen: np.ndarray, *, allowed: np.ndarray, rng: np.random.Generator
) -> int:
    """Return the allowed row of (n, d) points that is farthest from all chosen rows (maximin)."""
    if len(chosen):
        apart = points[allowed][:, None, :] - chosen[None, :, :]
        distance = np.linalg.norm(apart, axis=2).min(axis=1)
    else:
        distance = -np.linalg.norm(points[allowed] - points.mean(axis=0), axis=1)
    ties = np.flatnonzero(distance >= distance.max() - 1e-9)
    return int(allowed[rng.choice(ties)])
