"""Acquisition: expected hypervolume improvement per joule, over launches with their live settings.

A probe is worth the hypervolume that its measurements are expected to add to the front (expected
improvement, in log energy and log time), per joule that it is predicted to cost. A launch is paid
once, a further live setting only its settling and its window, so live settings are added while
they are worth it, and a running launch is extended for the windows alone. Expectations are over
fixed quasi-random draws of the surrogates, in which energy is step time times power and so moves
with time. Before there is enough to model, a few launches are spread over the space (`farthest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, qmc

from tuner.models.surrogate.surrogates import Posterior, Surrogates
from tuner.pareto import hypervolume, improvement, nondominated, reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.settings import SamplerDesign
from tuner.search.live_sweep import Sweep, greedy_sweep
from tuner.search_spaces.configuration import Configuration

__all__ = [
    "CandidateView",
    "FrontEstimate",
    "ProbeAcquisition",
    "Scored",
    "farthest",
    "normal_draws",
    "search_reference",
]

#: Number of draws that score single settings, and of draws that build a probe's sweep.
SINGLE_DRAWS, JOINT_DRAWS = 64, 128
#: Number of launches whose best sweep is built: those with the best single settings.
LAUNCHES_TRIED = 12
#: Number of live settings of one launch that a sweep is built from: the best ones.
LIVE_TRIED = 64
#: If nothing is expected to improve the front, the settings of a launch that are at most this many
#: standard deviations farther behind it than the best one are visited together.
ALIKE_SD = 1.0


@dataclass(frozen=True)
class Scored:
    """One probe and its score.

    Attributes:
        members: indices into the candidates, all of one launch; the first is visited first.
        gain: expected hypervolume improvement of all of them together.
        cost_J: predicted joules of the probe.
        first_J: joules of the launch and its first window.
        relative_gain: gain over the hypervolume of the front so far, counted from the worst point
            that was tried.
    """

    members: tuple[int, ...]
    gain: float
    cost_J: float
    first_J: float
    relative_gain: float

    @property
    def score(self) -> float:
        """Expected improvement per joule."""
        return self.gain / max(self.cost_J, 1e-12)


@dataclass(frozen=True)
class CandidateView:
    """Candidates that may be proposed, at least one.

    Attributes:
        members: indices into all candidates, (n,).
        rows: their rows among the configurations that the surrogates track, (n,).
        launch_of: number of the launch of each, (n,).
        posterior: of each.
        fits: probability that each fits in memory, (n,).
        gpus: number of GPUs of each, (n,).
    """

    members: np.ndarray
    rows: np.ndarray
    launch_of: np.ndarray
    posterior: Posterior
    fits: np.ndarray
    gpus: np.ndarray


@dataclass(frozen=True)
class FrontEstimate:
    """Posterior means of the configurations that the front is made of.

    Attributes:
        points: log energy and log time, (n, 2): the measured configurations, then those in flight.
        measured: number of measured ones.
        gpus: number of GPUs of each, (n,).
    """

    points: np.ndarray
    measured: int
    gpus: np.ndarray

    @classmethod
    def of(
        cls,
        surrogates: Surrogates,
        measured: Sequence[Configuration],
        pending: Sequence[Configuration] = (),
    ) -> FrontEstimate:
        """Return the estimate of fitted surrogates."""
        every = [*measured, *pending]
        log_t, log_p = surrogates.mean(every)
        gpus = np.array([configuration.world_size for configuration in every])
        return cls(np.column_stack([log_t + log_p, log_t]), len(measured), gpus)


def normal_draws(draws: int, width: int, seed: int) -> np.ndarray:
    """Return quasi-random standard normal draws (scrambled Sobol), (draws, 2, width)."""
    engine = qmc.Sobol(2 * width, scramble=True, seed=seed)
    uniform = np.clip(engine.random(draws), 1e-9, 1 - 1e-9)
    return np.asarray(norm.ppf(uniform)).reshape(draws, 2, width)


def search_reference(front: np.ndarray, posterior: Posterior) -> np.ndarray:
    """Return the reference point during the search: that of the predicted front, (2,).

    The front measured so far may be one point, whose nadir would deny all worth to the rest of the
    trade-off; the predicted means tell how far it reaches.

    Args:
        front: log energy and log time so far, (n, 2).
        posterior: of all candidates that may still be proposed.
    """
    predicted = np.column_stack([posterior.log_energy, posterior.log_time])
    return np.maximum(reference_point(np.vstack([front, predicted])), reference_point(front))


@dataclass(frozen=True)
class ProbeAcquisition:
    """Expected hypervolume improvement per joule of whole probes.

    Attributes:
        surrogates: fitted, with the pending configurations believed.
        cost: predicted joules of launches and windows.
        design: number of live settings a probe, weight of the cost, and whether the first window of
            a launch decides about the rest of its sweep.
        draws: `normal_draws` for single settings, (draws, 2, 1), and for sweeps, (draws, 2, live).
    """

    surrogates: Surrogates
    cost: ProbeCost
    design: SamplerDesign
    draws: tuple[np.ndarray, np.ndarray]

    def best(
        self, front: FrontEstimate, candidates: CandidateView, running_launch: int | None = None
    ) -> Scored:
        """Return the probe with the most expected improvement per joule.

        Args:
            front: to be improved on.
            candidates: may be proposed; the surrogates track them.
            running_launch: number of a launch that can be extended without the cost of a launch.

        Returns:
            The probe; its gain is 0 if no draw of any candidate improves the front.
        """
        posterior, launch_of = candidates.posterior, candidates.launch_of
        reference = search_reference(front.points, posterior)
        corners, measured = _corners(front.points), _corners(front.points[: front.measured])
        gain = self._single_gains(corners, reference, candidates)
        launch_J = np.where(launch_of == running_launch, 0.0, self.cost.launch_J(posterior.power_W))
        visit_J = self.cost.visit_J(posterior.power_W, posterior.step_time_s)
        if not gain.any():
            return self._nearest(corners, candidates, launch_J, visit_J)
        rate = gain / (launch_J + visit_J) ** self.design.cost_weight
        order = np.argsort(-rate, kind="stable")
        _, places = np.unique(launch_of[order], return_index=True)
        found: tuple[np.ndarray, Sweep, float, float] | None = None
        best_rate = -1.0
        for launch in launch_of[order][np.sort(places)[:LAUNCHES_TRIED]]:
            rows = order[launch_of[order] == launch][:LIVE_TRIED]  # best single setting first
            log_t, log_p = self.surrogates.sample_watched(candidates.rows[rows], self.draws[1])
            first_decides = self.design.extend_launches and launch != running_launch
            sweep = Sweep(
                log_t + log_p,
                log_t,
                corners,
                reference,
                beaten_by=measured if first_decides else None,
                noise=self.surrogates.noise(),
            )
            total, joules = greedy_sweep(
                sweep,
                launch_J[rows[0]],
                visit_J[rows],
                self.design.max_live,
                self.design.cost_weight,
            )
            total *= float(candidates.fits[rows[0]])
            if total / joules**self.design.cost_weight > best_rate:
                best_rate = total / joules**self.design.cost_weight
                found = rows, sweep, total, joules
        assert found is not None
        rows, sweep, total, joules = found
        # The gain is compared with what the front has over the worst that was tried: the corner
        # that a one-point front spans to its own reference point is next to nothing.
        worst = np.maximum(front.points.max(axis=0), reference)
        first = rows[sweep.added[0]]
        return Scored(
            members=tuple(int(member) for member in candidates.members[rows[sweep.added]]),
            gain=total,
            cost_J=joules,
            first_J=float(launch_J[first] + visit_J[first]),
            relative_gain=total / max(hypervolume(corners, worst), 1e-12),
        )

    def _single_gains(
        self, corners: np.ndarray, reference: np.ndarray, candidates: CandidateView
    ) -> np.ndarray:
        """Return the expected improvement of each candidate alone, (n,)."""
        posterior, draws = candidates.posterior, self.draws[0]
        log_t = posterior.log_time + draws[:, 0] * posterior.log_time_std
        log_p = posterior.log_power + draws[:, 1] * posterior.log_power_std
        gains = improvement(corners, log_t + log_p, log_t, reference)
        return np.asarray(gains.mean(axis=0) * candidates.fits)

    def _nearest(
        self,
        corners: np.ndarray,
        candidates: CandidateView,
        launch_J: np.ndarray,
        visit_J: np.ndarray,
    ) -> Scored:
        """Return the probe nearest to the front; its gain is 0.

        The settings of its launch that are about as near are visited with it.
        """
        behind = _sds_behind(corners, candidates.posterior)
        best = int(np.argmin(behind))
        alike = (candidates.launch_of == candidates.launch_of[best]) & (
            behind <= behind[best] + ALIKE_SD
        )
        chosen = np.flatnonzero(alike)
        chosen = chosen[np.argsort(behind[chosen], kind="stable")][: self.design.max_live]
        return Scored(
            members=tuple(int(i) for i in candidates.members[chosen]),
            gain=0.0,
            cost_J=float(launch_J[best] + visit_J[chosen].sum()),
            first_J=float(launch_J[best] + visit_J[best]),
            relative_gain=0.0,
        )


def _corners(points: np.ndarray) -> np.ndarray:
    """Return the non-dominated points, in their order."""
    return points[nondominated(points[:, 0], points[:, 1])]


def _sds_behind(corners: np.ndarray, posterior: Posterior) -> np.ndarray:
    """Return the number of standard deviations by which each point misses the front, (n,).

    Against one corner the nearer axis is enough; the worst of the corners counts.
    """
    behind_e = (posterior.log_energy[:, None] - corners[:, 0]) / posterior.log_energy_std[:, None]
    behind_t = (posterior.log_time[:, None] - corners[:, 1]) / posterior.log_time_std[:, None]
    return np.asarray(np.minimum(behind_e, behind_t).max(axis=1))


def farthest(
    points: np.ndarray, chosen: np.ndarray, *, allowed: np.ndarray, rng: np.random.Generator
) -> int:
    """Return the allowed row that is farthest from all chosen rows (maximin).

    With none chosen, the row nearest to the mean of all. Ties are drawn.

    Args:
        points: (n, d).
        chosen: (k, d), k may be 0.
        allowed: indices into points, at least one.
        rng: for ties.
    """
    if len(chosen):
        distance = np.min(
            np.linalg.norm(points[allowed][:, None, :] - chosen[None, :, :], axis=2), axis=1
        )
    else:
        distance = -np.linalg.norm(points[allowed] - points.mean(axis=0), axis=1)
    ties = np.flatnonzero(distance >= distance.max() - 1e-9)
    return int(allowed[rng.choice(ties)])
