"""Sweep over the live settings of one launch, as far as they are expected to be visited.

A launch is paid once and a further setting costs its window, so a launch is worth the gains of all
its settings that are worth their own joules. The probe decides on them after its first window
(`CandidateSampler.plan_continuation`), and the sweep foresees that decision: a setting is not
visited if its optimistic figures, given that window, are beaten on both axes. So a wide sweep of a
launch that may turn out poor is charged little more than one window. Everything is computed over
the same joint draws of the surrogates.
"""

from __future__ import annotations

import numpy as np

from tuner.pareto import joint_improvement

__all__ = ["Sweep", "greedy_sweep"]

#: A setting's optimistic figures lie this many standard deviations below its expectation given the
#: first window.
OPTIMISM_SD = 1.0
#: Number of settings that are tried as the first of a sweep: those with the most to gain.
ROOTS_TRIED = 8


class Sweep:
    """Settings of one launch, those that a probe visits, and the fronts that they are added to.

    Args:
        energy: joint draws of the settings' log energy, (draws, settings).
        time: joint draws of their log time, (draws, settings).
        front: log energy and log time to improve on, (n, 2), the same in every draw.
        reference: (2,).
        beaten_by: points that a setting's optimistic figures are compared with after the first
            window, (k, 2); None if that window is past or decides nothing, so that every setting
            is visited.
        noise: standard deviation of one window's log time and of its log power.

    Attributes:
        added: the settings that the probe visits, in that order.
        visited: mask of the draws in which each setting is visited once added, (draws, settings).
    """

    def __init__(
        self,
        energy: np.ndarray,
        time: np.ndarray,
        front: np.ndarray,
        reference: np.ndarray,
        *,
        beaten_by: np.ndarray | None = None,
        noise: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.energy, self.time = energy, time
        self._beaten_by, self._noise = beaten_by, noise
        self._front_e, self._front_t = (
            np.tile(front[:, axis], (len(energy), 1)) for axis in (0, 1)
        )
        self._reference = reference
        self.added: list[int] = []
        self.visited = np.ones(energy.shape, dtype=bool)

    def gains(self) -> np.ndarray:
        """Return the hypervolume that each setting would add in each draw, (draws, settings)."""
        return self.visited * joint_improvement(
            self._front_e, self._front_t, self.energy, self.time, self._reference
        )

    @property
    def first_decides(self) -> bool:
        """True if the first window decides about the rest."""
        return self._beaten_by is not None

    @property
    def chance(self) -> np.ndarray:
        """Probability that each setting is visited, (settings,)."""
        return np.asarray(self.visited.mean(axis=0))

    def add(self, setting: int) -> None:
        """Add a setting to the visited ones; the first one decides about the others."""
        if not self.added and self._beaten_by is not None:
            self.visited = self._decided_by(setting)
        self.added.append(setting)
        hidden = np.where(self.visited[:, setting], 0.0, np.inf)[:, None]
        self._front_e = np.hstack([self._front_e, self.energy[:, setting, None] + hidden])
        self._front_t = np.hstack([self._front_t, self.time[:, setting, None] + hidden])

    def decisive(self, visit_J: np.ndarray) -> int:
        """Return the setting whose window leaves the fewest joules to be spent on the others.

        Only the first `ROOTS_TRIED` settings are tried.
        """
        roots = range(min(ROOTS_TRIED, len(visit_J)))
        left_J = [visit_J[r] + visit_J @ self._decided_by(r).mean(axis=0) for r in roots]
        return int(np.argmin(left_J))

    def _decided_by(self, root: int) -> np.ndarray:
        """Return a mask of the draws in which each setting is visited after the root's window.

        Shape (draws, settings).
        """
        reach = np.empty((self.energy.shape[1], 2))
        power = self.energy - self.time
        for axis, (figure, noise) in enumerate(zip((self.time, power), self._noise, strict=True)):
            apart = figure - figure[:, [root]]
            spread = np.hypot(apart.std(axis=0), noise)
            reach[:, axis] = apart.mean(axis=0) - OPTIMISM_SD * spread
        optimistic_t = self.time[:, [root]] + reach[:, 0]
        optimistic_e = self.energy[:, [root]] + reach.sum(axis=1)
        visited = np.ones(self.energy.shape, dtype=bool)
        for front_e, front_t in self._beaten_by if self._beaten_by is not None else ():
            visited &= (optimistic_e <= front_e) | (optimistic_t <= front_t)
        visited[:, root] = True
        return visited


def greedy_sweep(
    sweep: Sweep, launch_J: float, visit_J: np.ndarray, max_live: int, cost_weight: float
) -> tuple[float, float]:
    """Add settings while each gains as much per joule as the whole sweep.

    If the first window decides, the first setting is the one whose window is expected to save the
    most joules; else the one that gains the most per joule.

    Args:
        sweep: of the launch; settings are added to it.
        launch_J: joules of the launch; 0 if it is running.
        visit_J: joules of each setting, (settings,).
        max_live: maximum number of settings.
        cost_weight: exponent of the cost.

    Returns:
        The joint gain of the settings added and the joules that are expected to be spent.
    """
    total, joules, rate = 0.0, float(launch_J), 0.0
    while len(sweep.added) < min(max_live, len(visit_J)):
        gains = sweep.gains().mean(axis=0)
        expected_J = np.maximum(visit_J * sweep.chance, 1e-12)
        rates = (total + np.maximum(gains, 0.0)) / (joules + expected_J) ** cost_weight
        rates[sweep.added] = -1.0
        best = int(np.argmax(rates))
        if not sweep.added and sweep.first_decides:
            best = sweep.decisive(visit_J)
        if sweep.added and (
            gains[best] <= 0 or gains[best] / expected_J[best] ** cost_weight < rate
        ):
            break
        sweep.add(best)
        total, joules = total + max(float(gains[best]), 0.0), joules + float(expected_J[best])
        rate = max(rate, total / joules**cost_weight)
    return total, joules
