"""Score: the worth of a probe per joule, over joint draws of the surrogates.

For the front it is the expected fall of the log regret (`tuner.search.log_regret`). A launch is
paid once, a further live setting only its window, so settings are added while they are worth it. A
running launch is extended for the windows alone, and another launch is charged for coming back to
it where settings of it are still missing.

For a question it is the expected fall of the least loss: constrained expected improvement (Gardner
et al. 2014, "Bayesian optimization with inequality constraints", ICML).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.surrogate.ties import first_best
from tuner.problem.problem import ProbeCost
from tuner.search.candidate_pool import CandidateView
from tuner.search.joint_draws import JointDraws
from tuner.search.log_regret import Sweep


@dataclass(frozen=True)
class ScoredProbe:
    """One probe and its score."""

    # numbers of candidates, all of one launch; the first is visited first.
    members: tuple[int, ...]
    # expected fall of the log regret per joule, with the joules of coming back to a launch that is
    # left for this one; of a question that of its loss.
    score: float
    cost_J: float
    first_J: float
    expected_gain: float


def best_probe(
    drawn: JointDraws, cost: ProbeCost, most_live: int, running_launch: int | None = None
) -> ScoredProbe:
    """Return the probe that is worth the most per joule, for the front or for the question.

    Args:
        most_live: settings that one probe visits at most.
        running_launch: launch that goes on without being paid again.
    """
    tried = drawn.still_open
    starts = tried.launch_of != running_launch
    launch_J = np.where(starts, cost.launch_J(tried.posterior.power_W), 0.0)
    visit_J = cost.visit_J(tried.posterior.power_W, tried.posterior.step_time_s)
    if drawn.question is not None:
        gain = drawn.answer_gains.mean(axis=0)
        scores = gain / (launch_J + visit_J)
        best = first_best(scores) if gain.any() else _widest(tried)
        return _window(drawn, best, launch_J + visit_J, float(gain[best]))
    sweeps, return_J = [], 0.0
    launches = [np.flatnonzero(tried.launch_of == each) for each in np.unique(tried.launch_of)]
    for rows in launches:
        sweep = Sweep(drawn.front, rows, launch_J[rows], visit_J[rows])
        sweep.grow(most_live)
        if starts[rows[0]]:
            sweep.begin_cheaply()
        else:
            return_J = sweep.needed * float(cost.launch_J(tried.posterior.power_W[rows]).min())
        sweeps.append(sweep)
    # A launch that ends the running one is charged for coming back as well.
    leaves = np.array([starts[rows[0]] for rows in launches])
    joules = np.array([sweep.cost_J for sweep in sweeps]) + return_J * leaves
    scores = np.array([sweep.value for sweep in sweeps]) / np.maximum(joules, 1e-12)
    best = first_best(scores)
    if scores[best] <= 0:
        return _window(drawn, _widest(tried), launch_J + visit_J, 0.0)
    sweep = sweeps[best]
    members = tuple(tried.members[launches[best][sweep.added]].tolist())
    gain = float(sweep.share.mean())
    return ScoredProbe(members, float(scores[best]), sweep.cost_J, sweep.first_J, gain)


def _window(drawn: JointDraws, row: int, joules: np.ndarray, gain: float) -> ScoredProbe:
    cost_J, member = float(joules[row]), int(drawn.still_open.members[row])
    return ScoredProbe((member,), gain / cost_J, cost_J, cost_J, gain)


def _widest(tried: CandidateView) -> int:
    # Where nothing is worth anything: of the likely ones that with the widest posterior.
    return int(tried.likely[first_best(tried.posterior.log_energy_std[tried.likely])])
