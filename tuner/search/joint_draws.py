"""Candidates that a plan considers, and joint draws of those that matter.

All candidates are considered; beyond what a posterior takes a moment for, launches are drawn at
random, and those that differ from one of the front in a single launch knob are added. The sample is
renewed whenever the hyperparameters are fitted.

One set of draws, of the measured candidates and of the open ones with the most to gain, tells what
a probe is worth and what the search still misses (`RegretEstimate`), of the front or of a question.
Each draw is at hyperparameters of its own, and they are wider than the plain posterior, which is
too sure of itself after a few measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial.distance import cdist

from tuner.models.memory_margin import REFUSED_BELOW
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.gaussian_process import (
    LIVE,
    TOLERANCE,
    first_best,
    quasi_normal,
    ranked,
)
from tuner.models.surrogate.surrogates import Posterior, Surrogates
from tuner.pareto import improvement, nondominated
from tuner.problem.problem import ProbeCost
from tuner.search.evidence import Observations
from tuner.search.question import Question
from tuner.search_spaces.configuration import Configuration, Settings

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates

#: Number of candidates up to which all are taken.
ALL_CANDIDATES = 100_000
#: measurements^2 x candidates from which fewer are taken, what their posterior takes (0.1 s of a
#: core), and the number that is taken however many measurements there are.
MOST_WORK, LEAST_TAKEN = 400_000_000, 1000
#: Standard deviation of a knee's error over the distance to the next measured setting, a share of a
#: knob's range.
KNEE = 0.15
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


def launch_codes(launches: Sequence[Settings]) -> np.ndarray:
    """Return the numbers of the levels of each launch, one column a knob, (launches, knobs)."""
    named = [Configuration(launch) for launch in launches]
    columns = []
    for name in sorted({name for launch in launches for name in launch}):
        values = [launch.get(name) for launch in named]
        levels = {level: i for i, level in enumerate(dict.fromkeys(values))}
        columns.append([levels[value] for value in values])
    return np.array(columns, dtype=np.int32).reshape(len(columns), len(launches)).T


def neighbours(codes: np.ndarray, launches: Iterable[int]) -> np.ndarray:
    """Return these launches and those that differ from any of them in one knob."""
    near = np.zeros(len(codes), dtype=bool)
    for launch in launches:
        near |= (codes != codes[launch]).sum(axis=1) <= 1
    return np.flatnonzero(near)


@dataclass(frozen=True)
class CandidateView:
    """Candidates that may be proposed, or measured ones, with their expected figures."""

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


def knee_sd(features: FeatureMap, known: CandidateView, tried: CandidateView) -> np.ndarray:
    """Return the error of each open setting next to the measured front, a standard deviation, (n,).

    A smooth surrogate draws a knee too high between two windows, and noise can hide a whole curve:
    the front is then believed to end where it does not. So where the nearest measured setting of a
    launch is on the front, an open one may lie off the curve, the farther the more (`KNEE`). Of
    several live columns, as of a clock for each stage, it is their root mean square that counts.
    """
    live = features.kinds == LIVE
    on_front = nondominated(*known.points.T)
    sd = np.zeros(len(tried.members))
    for launch in np.unique(known.launch_of[on_front]):
        rows, own = np.flatnonzero(tried.launch_of == launch), known.launch_of == launch
        open_, measured = (
            features.matrix[each][:, live] for each in (tried.members[rows], known.members[own])
        )
        apart = cdist(open_, measured) / np.sqrt(live.sum())
        nearest = apart.argmin(axis=1)
        sd[rows] = KNEE * apart.min(axis=1) * on_front[own][nearest]
    return sd


class CandidatePool:
    """Views of the candidates that a plan considers."""

    def __init__(
        self,
        surrogates: Surrogates,
        candidates: Candidates,
        members: Sequence[np.ndarray],
        launch_of: np.ndarray,
        rng: np.random.Generator,
    ) -> None:
        self._surrogates, self._candidates = surrogates, candidates
        self._members, self._launch_of, self._rng = members, launch_of, rng
        self._codes: np.ndarray | None = None
        self._gpus = np.array([Configuration(launch).world_size for launch in candidates.launches])
        # Numbers of the candidates that are looked at; None until they are chosen anew.
        self.tracked: np.ndarray | None = None

    def views(
        self, observations: Observations, closed: np.ndarray, chances: np.ndarray
    ) -> tuple[CandidateView, CandidateView]:
        """Return what is measured or in flight, and what may be proposed, at least one."""
        if self.tracked is None or closed[self.tracked].all():
            poor = closed | (chances < REFUSED_BELOW)
            self.tracked = self._sample(observations, closed if poor.all() else poor)
        measured = dict.fromkeys(m.candidate for m in observations.measured)
        known = np.array([*measured, *observations.pending])
        tried = self.tracked[~closed[self.tracked]]
        return self._view(known, chances), self._view(tried, chances)

    def _view(self, members: np.ndarray, chances: np.ndarray) -> CandidateView:
        launch_of, posterior = self._launch_of[members], self._surrogates.predict(members)
        gpus = self._gpus[launch_of]
        return CandidateView(members, launch_of, posterior, chances[members], gpus)

    def _sample(self, observations: Observations, closed: np.ndarray) -> np.ndarray:
        measured, n = observations.measured, len(closed)
        most = min(ALL_CANDIDATES, max(MOST_WORK // len(measured) ** 2, LEAST_TAKEN))
        if n <= most:
            return np.arange(n)
        if self._codes is None:
            self._codes = launch_codes(self._candidates.launches)
        power_W, time_s = np.array([(m.window.power_W, m.window.step_time_s) for m in measured]).T
        best = nondominated(power_W * time_s, time_s)
        front = {int(self._launch_of[measured[i].candidate]) for i in np.flatnonzero(best)}
        still_open = np.unique(self._launch_of[~closed])
        near = np.intersect1d(neighbours(self._codes, front), still_open)
        count = min(max(1, most * len(self._members) // n), len(still_open))
        drawn = self._rng.choice(still_open, count, replace=False)
        return np.concatenate([self._members[i] for i in np.union1d(near, drawn)])


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
        rough = knee_sd(surrogates.features, measured, self.still_open)
        errors = np.random.default_rng(seed).standard_normal((2, DRAWS, OPEN_DRAWN + LIVE_DRAWN))
        time[:, self.count :] += errors[0, :, : len(rough)] * rough
        power[:, self.count :] += errors[1, :, : len(rough)] * rough
        gpus = np.append(self.measured.gpus, self.still_open.gpus)
        logs = time + power, time
        # Of each figure that is to be low, or of the question's loss.
        self._logs = logs if question is None else (question.loss(*logs, gpus),)
        shares = (np.random.default_rng(0).permutation(DRAWS) + 0.5) / DRAWS
        for log in self._logs:
            log[:, self.count :] += FAR * (shares[:, None] >= self.still_open.chances)

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


# Regret of a search, and the probe that lowers it the most for its joules.
#
# The front regret is what a search loses of the front: of each point of the front the least factor
# by which a measured one is worse in energy and time, and of these the largest (`tuner.pareto`). Of
# a question (`tuner.search.question`) it is what the answer loses to the best one. Every joint draw
# has a regret of its own, in logarithms. A probe is worth the expected fall of the regret's
# logarithm, so that a draw in which a launch misses the front by far weighs no more than one in
# which the last settings of a good launch are missing. A search may end when the regret is small in
# nearly all draws (Makarova et al. 2022, "Automatic termination for hyperparameter optimization",
# AutoML; Wilson 2024, "Stopping Bayesian optimization with probabilistic regret bounds", NeurIPS).


#: Added to the regret before its logarithm is taken: what hardly anyone would feel. Half of it is
#: near enough to a point of the front.
LEAST_REGRET = 0.01
ENOUGH = LEAST_REGRET / 2


@dataclass(frozen=True)
class RegretEstimate:
    """Draws of the regret, (draws,): a logarithm, at least 0."""

    draws: np.ndarray
    of_answer: bool = False  # True if it is the regret of a question's answer

    def probability_above(self, share: float) -> float:
        """Return the probability that more than this share is lost."""
        return float(np.mean(np.expm1(self.draws) > share))

    @property
    def saving(self) -> float:
        """Expected saving of energy, a share, if what is lost were found."""
        return float(np.mean(-np.expm1(-self.draws)))


@dataclass(frozen=True)
class ScoredProbe:
    """One probe and its score."""

    member: int  # number of the candidate to visit first
    # expected fall of the log regret per joule, with the joules of coming back to a launch that is
    # left for this one.
    score: float
    cost_J: float
    first_J: float
    expected_gain: float  # expected fall of the regret


def swept(drawn: JointDraws, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which settings of a launch are visited in each draw, (draws, settings), and what is
    still lost against each open candidate then, (draws, open).

    A probe decides after each window whether to go on. So in each draw it visits the setting that
    is best against the candidate where the launch mends the most, as long as that is worth it, and
    `most` settings at most: a wide sweep of a launch that may turn out poor is charged little more
    than one window.

    Args:
        rows: numbers of the settings among the open candidates.
    """
    worse, losses = drawn.worse[:, :, drawn.count + rows], drawn.losses
    every = np.arange(len(losses))
    visited = np.zeros((len(losses), len(rows)), dtype=bool)
    whole = np.minimum(losses, np.maximum(worse.min(axis=2), 0.0))
    for _ in range(min(most, len(rows))):
        mended = np.round((losses - whole) / TOLERANCE)
        point = mended.argmax(axis=1)
        best = np.round(worse[every, point] / TOLERANCE).argmin(axis=1)
        helps = mended[every, point] > ENOUGH / TOLERANCE
        if not helps.any():
            break
        visited[every[helps], best[helps]] = True
        losses = np.where(helps[:, None], np.minimum(losses, worse[every, :, best]), losses)
    return visited, np.maximum(losses, 0.0)


def best_probe(
    drawn: JointDraws,
    cost: ProbeCost,
    most_live: int,
    running_launch: int | None = None,
    probes_left: float = math.inf,
) -> ScoredProbe:
    """Return the probe that is worth the most for its cost: its joules, and one of the probes left.

    A launch is paid once, a further live setting only its window. A launch that ends the running
    one is charged for coming back to it, too, where settings of it are still missing.

    Args:
        most_live: settings that one probe visits at most.
        running_launch: launch that goes on without being paid again.
        probes_left: number of launches that can still be made.
    """
    tried, power_W = drawn.still_open, drawn.still_open.posterior.power_W
    starts = tried.launch_of != running_launch
    launch_J = np.where(starts, cost.launch_J(power_W), 0.0)
    visit_J = cost.visit_J(power_W, tried.posterior.step_time_s)
    launches = [np.flatnonzero(tried.launch_of == each) for each in np.unique(tried.launch_of)]
    leaves = np.array([starts[rows[0]] for rows in launches])
    sweeps = [swept(drawn, rows, most_live) for rows in launches]
    chances = [visited.mean(axis=0) for visited, _ in sweeps]
    joules = np.array(
        [
            float(launch_J[rows].min() + max(chance @ visit_J[rows], visit_J[rows].min()))
            for rows, chance in zip(launches, chances, strict=True)
        ]
    )
    lefts = [left for _, left in sweeps]
    counts, needed_J = outlook(drawn, lefts, joules, probes_left + (not leaves.all()))
    price_J = needed_J / max(probes_left, TOLERANCE)
    falls = [np.log((drawn.losses + LEAST_REGRET) / (left + LEAST_REGRET)) for left in lefts]
    value = np.array([(counts * fall).max(axis=1).mean() for fall in falls])
    mended = [(drawn.losses - left).max(axis=1) for left in lefts]
    return_J = sum(
        float(np.mean(mends > LEAST_REGRET)) * (cost.launch_J(power_W[rows]).min() + price_J)
        for rows, mends, leave in zip(launches, mended, leaves, strict=True)
        if not leave
    )
    scores = value / np.where(leaves, joules + price_J + return_J, joules)
    best = first_best(scores)
    rows, chance, gain = launches[best], chances[best], float(mended[best].mean())
    if scores[best] <= 0:  # nothing is worth anything: what is likely and uncertain comes first
        first = first_best(tried.chances * tried.posterior.log_energy_std)
        gain = 0.0
    else:
        first = int(rows[first_best(chance / (launch_J + visit_J)[rows])])
    first_J = float(launch_J[first] + visit_J[first])
    cost_J = max(float(joules[best]), first_J) if gain else first_J
    return ScoredProbe(int(tried.members[first]), float(scores[best]), cost_J, first_J, gain)


def outlook(
    drawn: JointDraws, lefts: Sequence[np.ndarray], joules: np.ndarray, sweeps_left: float
) -> tuple[np.ndarray, float]:
    """Return how much each open candidate counts in each draw, (draws, open), and the joules that
    are expected to be needed until nothing is lost.

    In each draw that launch is made again and again which mends the most where the most is lost. So
    many launches cannot be spared. The others tell which of the open candidates are the best: one
    that is not on the front of the draw counts as far as there are others, and fully only in a
    search without limits.

    Args:
        lefts: what is lost against each open candidate after the sweep of each launch.
        joules: of each launch.
        sweeps_left: number of launches that can be swept until the end.
    """
    every, each = np.arange(len(drawn.losses)), np.round(np.stack(lefts) / TOLERANCE)
    losses = np.round(drawn.losses / TOLERANCE)
    launches, needed_J = np.zeros(len(every)), 0.0
    for _ in lefts:
        point = losses.argmax(axis=1)
        best = each[:, every, point].argmin(axis=0)
        mends = losses[every, point] > ENOUGH / TOLERANCE
        launches += mends
        needed_J += float((mends * joules[best]).mean())
        losses = np.minimum(losses, each[best, every])
    spare = np.maximum(1 - launches / max(sweeps_left, TOLERANCE), 0.0)
    on_front = drawn.worse[:, :, drawn.count :].min(axis=2) > -TOLERANCE
    return np.where(on_front, 1.0, spare[:, None]), needed_J
