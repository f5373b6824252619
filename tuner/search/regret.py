"""Regret of a search, and the probe that lowers it the most for its joules.

The front regret is what a search loses of the front: of each point of the front the least factor by
which a measured one is worse in energy and time, and of these the largest (`tuner.pareto`). Of a
question (`tuner.search.question`) it is what the answer loses to the best one. Every joint draw has
a regret of its own, in logarithms. A probe is worth the expected fall of the regret's logarithm, so
that a draw in which a launch misses the front by far weighs no more than one in which the last
settings of a good launch are missing. A search may end when the regret is small in nearly all draws
(Makarova et al. 2022, "Automatic termination for hyperparameter optimization", AutoML; Wilson 2024,
"Stopping Bayesian optimization with probabilistic regret bounds", NeurIPS).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.gaussian_process import LEAST_ROWS, TOLERANCE, first_best
from tuner.problem.problem import ProbeCost
from tuner.search.joint_draws import JointDraws

#: With fewer measurements no regret is estimated: the hyperparameters are not fitted yet.
LEAST_MEASUREMENTS = LEAST_ROWS
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
    """Return which settings of a launch are visited in each draw, (draws, settings), and what each
    point of the front still loses then, (draws, open).

    A probe decides after each window whether to go on. So in each draw it visits the setting that
    is best where the launch mends the front the most, as long as that is worth it, and `most`
    settings at most: a wide sweep of a launch that may turn out poor is charged little more than
    one window.

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
    drawn: JointDraws, cost: ProbeCost, most_live: int, running_launch: int | None = None
) -> ScoredProbe:
    """Return the probe that is worth the most per joule.

    A launch is paid once, a further live setting only its window. A launch that ends the running
    one is charged for coming back to it, too, where settings of it are still missing.

    Args:
        most_live: settings that one probe visits at most.
        running_launch: launch that goes on without being paid again.
    """
    tried, power_W = drawn.still_open, drawn.still_open.posterior.power_W
    starts = tried.launch_of != running_launch
    launch_J = np.where(starts, cost.launch_J(power_W), 0.0)
    visit_J = cost.visit_J(power_W, tried.posterior.step_time_s)
    value, joules, return_J = [], [], 0.0
    launches = [np.flatnonzero(tried.launch_of == each) for each in np.unique(tried.launch_of)]
    every: list[tuple[np.ndarray, float]] = []
    for rows in launches:
        visited, left = swept(drawn, rows, most_live)
        chance, mended = visited.mean(axis=0), (drawn.losses - left).max(axis=1)
        falls = np.log((drawn.losses + LEAST_REGRET) / (left + LEAST_REGRET)).max(axis=1)
        value.append(float(falls.mean()))
        joules.append(
            float(launch_J[rows].min() + max(chance @ visit_J[rows], visit_J[rows].min()))
        )
        every.append((chance, float(mended.mean())))
        if not starts[rows[0]]:
            needed = np.mean(mended > LEAST_REGRET)
            return_J = float(needed * cost.launch_J(power_W[rows]).min())
    leaves = np.array([starts[rows[0]] for rows in launches])
    scores = np.array(value) / (np.array(joules) + return_J * leaves)
    best = first_best(scores)
    rows, (chance, gain) = launches[best], every[best]
    if scores[best] <= 0:  # nothing is worth anything: the likely one with the widest posterior
        first = int(tried.likely[first_best(tried.posterior.log_energy_std[tried.likely])])
        gain = 0.0
    elif starts[rows[0]]:
        # Where the whole probe is expected to cost the least: where power is low, a launch and a
        # window that rule the launch out are cheap.
        first = int(rows[first_best(-(launch_J[rows] + (1 - chance) * visit_J[rows]))])
    else:
        first = int(rows[first_best(chance / visit_J[rows])])
    first_J = float(launch_J[first] + visit_J[first])
    cost_J = max(joules[best], first_J) if gain else first_J
    return ScoredProbe(int(tried.members[first]), float(scores[best]), cost_J, first_J, gain)
