"""What to probe next: the launch and the live settings to visit in it, chosen together.

A probe is worth the hypervolume that its measurements are expected to add to the front (expected
improvement, in log energy and log time), per joule that it is predicted to cost. A launch is paid
once, a further live setting only its settle and window, so live settings are added while they are
worth it, and a launch that is up is gone on with for the windows alone. Expectations are over fixed
quasi-random draws of the surrogates, in which energy is step time times power and so moves with
time. Before there is enough to model, a few launches are spread over the space.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm, qmc

from models.surrogate import Posterior, Surrogates
from search_spaces.configuration import Configuration
from tuner.pareto import hypervolume, improvement, nondominated, reference_point
from tuner.sweep import Sweep, grow
from workload.probe import ProbeRecord

__all__ = ["ProbeCost", "Scored", "choose_probe", "farthest", "normal_draws", "search_reference"]

#: Draws that every candidate is scored with, and draws that a probe's set is built with.
SINGLE_DRAWS, JOINT_DRAWS = 64, 128
#: Launches whose best set of live settings is worked out: those with the best single settings.
LAUNCHES_TRIED = 12
#: Live settings of one launch that are looked at together, the best ones.
LIVE_TRIED = 64


#: Where nothing is expected to improve, settings that are at most so many standard deviations
#: farther behind the front than the best of their launch are visited with it.
ALIKE_SD = 1.0


@dataclass(frozen=True)
class ProbeCost:
    """What probing is predicted to cost, so that worth can be told per joule.

    Attributes:
        launch_s: from the request to the first measured step, seconds.
        settle_s: at a new live setting before its window opens, seconds.
        window_s: a window's length, seconds.
        launch_power: power during the launch, as a share of the configuration's own.
        min_steps: a window holds at least so many steps.
    """

    launch_s: float = 30.0
    settle_s: float = 1.0
    window_s: float = 5.0
    launch_power: float = 0.5
    min_steps: int = 0

    def learned(self, records: Sequence[ProbeRecord]) -> ProbeCost:
        """With a launch's length and power as probes had them: medians over those that measured.

        A launch is all of a probe but its windows and what was settled before them.
        """
        lengths, powers = [], []
        for record in records:
            windows = record.measurements
            if not record.ok or not windows:
                continue
            settled_s = [self.settle_s if m.live else 0.0 for m in windows]
            length_s = record.wall_s - math.fsum(m.window_s for m in windows) - sum(settled_s)
            joules = record.energy_J - math.fsum(
                m.energy_J + s * m.power_W for m, s in zip(windows, settled_s, strict=True)
            )
            if length_s > 0 and joules > 0:
                lengths.append(length_s)
                powers.append(joules / (length_s * windows[0].power_W))
        if not lengths:
            return self
        return replace(
            self, launch_s=statistics.median(lengths), launch_power=statistics.median(powers)
        )

    def launch_J(self, power_W: np.ndarray) -> np.ndarray:
        """Joules of the launch of configurations that draw `power_W`."""
        return np.asarray(self.launch_s * self.launch_power * power_W)

    def visit_J(self, power_W: np.ndarray, step_time_s: np.ndarray) -> np.ndarray:
        """Joules of settling at a live setting and measuring it."""
        window = np.maximum(self.window_s, self.min_steps * step_time_s)
        return np.asarray((self.settle_s + window) * power_W)


@dataclass(frozen=True)
class Scored:
    """One probe and why.

    Attributes:
        members: indices into the candidates: one launch, the live setting to visit first first.
        gain: expected hypervolume improvement of all of them together.
        cost_J: predicted joules of the probe.
        first_J: of them, those of the launch and its first window.
        relative_gain: gain over the hypervolume of the front so far, to the worst that was tried.
        saving: gain over the range of log time that the front is counted in: by how much log energy
            comes down, averaged over that range. A gain in time alone counts by the front's own
            rate, its range of log energy for its range of log time.
    """

    members: tuple[int, ...]
    gain: float
    cost_J: float
    first_J: float
    relative_gain: float
    saving: float = 0.0

    @property
    def score(self) -> float:
        """Expected improvement per joule."""
        return self.gain / max(self.cost_J, 1e-12)


def normal_draws(draws: int, width: int, seed: int) -> np.ndarray:
    """Quasi-random standard normal draws, shape (draws, 2, width); Sobol, scrambled by the seed."""
    engine = qmc.Sobol(2 * width, scramble=True, seed=seed)
    uniform = np.clip(engine.random(draws), 1e-9, 1 - 1e-9)
    return np.asarray(norm.ppf(uniform)).reshape(draws, 2, width)


def search_reference(told: np.ndarray, posterior: Posterior) -> np.ndarray:
    """The reference point while the search runs: that of the front as it is predicted.

    The front measured so far may be one point, whose nadir would deny all worth to what lies along
    the trade-off; the predicted means say how far it reaches.

    Args:
        told: (n, 2), log energy and log time of what is measured.
        posterior: of all candidates that are still open.
    """
    predicted = np.column_stack([posterior.log_energy, posterior.log_time])
    return np.maximum(reference_point(np.vstack([told, predicted])), reference_point(told))


def choose_probe(
    surrogates: Surrogates,
    *,
    told: Sequence[Configuration],
    pending: Sequence[Configuration] = (),
    open_members: np.ndarray,
    open_rows: np.ndarray,
    launch_of: np.ndarray,
    posterior: Posterior,
    cost: ProbeCost,
    max_live: int,
    draws: tuple[np.ndarray, np.ndarray],
    cost_weight: float = 1.0,
    first_decides: bool = True,
    up: int | None = None,
    fits: np.ndarray | None = None,
) -> Scored:
    """The probe with the most expected improvement per joule.

    Args:
        surrogates: fitted, with what is in flight believed, watching at least `open_members`.
        told: configurations measured; with those in flight, their posterior means are the front so
            far.
        pending: configurations in flight.
        open_members: indices into the candidates that may be proposed, at least one.
        open_rows: where each of them stands among what the surrogates watch.
        launch_of: each candidate's launch, as a number.
        posterior: of `open_members`, in that order.
        cost: what a probe costs.
        max_live: live settings a probe at most.
        draws: `normal_draws` for single points (draws, 2, 1) and for sets (draws, 2, live).
        cost_weight: exponent of the cost in the score; 1 is per joule, 0 ignores cost.
        first_decides: the first window of a new launch decides about the rest of its sweep.
        up: the launch that is up and can be gone on with at no launch's cost, as a number.
        fits: probability that each of `open_members` fits in memory; 1 where None.

    Returns:
        The probe; its gain is 0 where no draw of any candidate improves the front.
    """
    log_t, log_p = surrogates.mean([*told, *pending])
    front = np.column_stack([log_t + log_p, log_t])
    measured = front[: len(told)]
    measured = measured[nondominated(measured[:, 0], measured[:, 1])]
    reference = search_reference(front, posterior)
    # How much is a gain? Against what the front has over the worst that was tried: the corner that
    # a one-point front spans to its own reference point is next to nothing.
    worst = np.maximum(front.max(axis=0), reference)
    front = front[nondominated(front[:, 0], front[:, 1])]
    covered = max(hypervolume(front, worst), 1e-12)

    single, joint = draws
    log_t = posterior.log_time + single[:, 0] * posterior.log_time_std
    log_p = posterior.log_power + single[:, 1] * posterior.log_power_std
    gain = improvement(front, log_t + log_p, log_t, reference).mean(axis=0)
    fits = np.ones(len(open_members)) if fits is None else fits
    gain *= fits
    launches = launch_of[open_members]
    launch_J = np.where(launches == up, 0.0, cost.launch_J(posterior.power_W))
    visit_J = cost.visit_J(posterior.power_W, posterior.step_time_s)
    if not gain.any():
        # No draw improves: what is the fewest standard deviations behind the front, with what of
        # its launch is much the same, worth nothing.
        behind = _sds_behind(front, posterior)
        best = int(np.argmin(behind))
        alike = (launches == launches[best]) & (behind <= behind[best] + ALIKE_SD)
        chosen = np.flatnonzero(alike)
        chosen = chosen[np.argsort(behind[chosen], kind="stable")][:max_live]
        first_J = float(launch_J[best] + visit_J[best])
        joules = float(launch_J[best] + visit_J[chosen].sum())
        return Scored(tuple(int(i) for i in open_members[chosen]), 0.0, joules, first_J, 0.0)

    rate = gain / (launch_J + visit_J) ** cost_weight
    order = np.argsort(-rate, kind="stable")
    _, places = np.unique(launches[order], return_index=True)
    tried = launches[order][np.sort(places)[:LAUNCHES_TRIED]]

    found: tuple[np.ndarray, Sweep, float, float] | None = None
    best_rate = -1.0
    for launch in tried:
        rows = order[launches[order] == launch][:LIVE_TRIED]  # best single setting first
        log_t, log_p = surrogates.sample_watched(open_rows[rows], joint)
        sweep = Sweep(
            log_t + log_p,
            log_t,
            front,
            reference,
            beaten_by=measured if first_decides and launch != up else None,
            noise=surrogates.noise(),
        )
        total, joules = grow(sweep, launch_J[rows[0]], visit_J[rows], max_live, cost_weight)
        worth = total * fits[rows[0]] / joules**cost_weight
        if worth > best_rate:
            best_rate, found = worth, (rows, sweep, total * float(fits[rows[0]]), joules)
    assert found is not None
    rows, sweep, total, joules = found
    first = rows[sweep.added[0]]
    first_J = float(launch_J[first] + visit_J[first])
    members = tuple(int(member) for member in open_members[rows[sweep.added]])
    saving = total / float(reference[1] - front[:, 1].min())
    return Scored(members, total, joules, first_J, total / covered, saving)


def _sds_behind(front: np.ndarray, posterior: Posterior) -> np.ndarray:
    """How many standard deviations each point would have to be better to be beaten by none, (n,).

    Against one point of the front the nearer axis is enough; the worst of the front's points says.
    """
    behind_e = (posterior.log_energy[:, None] - front[:, 0]) / posterior.log_energy_std[:, None]
    behind_t = (posterior.log_time[:, None] - front[:, 1]) / posterior.log_time_std[:, None]
    return np.asarray(np.minimum(behind_e, behind_t).max(axis=1))


def farthest(
    points: np.ndarray, chosen: np.ndarray, *, allowed: np.ndarray, rng: np.random.Generator
) -> int:
    """Maximin: the allowed row that is farthest from all chosen rows.

    With none chosen, the row nearest to the middle of all. Ties are drawn.

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
