"""Fall of the log regret: what a measurement is worth, draw by draw.

In each joint draw of the surrogates the regret is the share of that draw's front that the
measurements miss, and a measurement is worth the fall of its logarithm. So a draw in which a launch
misses the front by far weighs no more than one in which the last settings of a good launch are
missing. (Hypervolume improvement leaves such a launch for the most uncertain one, and returns.)
"""

from __future__ import annotations

import numpy as np

from tuner.pareto import REFERENCE_LEAST, REFERENCE_MARGIN, joint_improvement

#: Added to the regret before its logarithm is taken, a share of the front's hypervolume: what a
#: search may miss when it ends by default is hardly worth finding.
LEAST_REGRET = 0.02
#: Share below which a difference of two sums of areas is rounding.
ROUNDING = 1e-12


class LogRegret:
    """Value of open candidates in each joint draw, given what is measured.

    Each draw has a reference point of its own, beyond the nadir of its front
    (`tuner.pareto.reference_point`), which is the origin of the coordinates here.

    Args:
        energy, time: joint draws of log energy and log time, (draws, measured + open).
        measured: number of configurations that are measured or in flight, the first ones.

    Attributes:
        missing: regret before any open candidate is measured, (draws,).
        whole: hypervolume of each draw's front, (draws,).
    """

    def __init__(self, energy: np.ndarray, time: np.ndarray, *, measured: int) -> None:
        energy = energy - _reference(energy, time)[:, None]
        time = time - _reference(time, energy)[:, None]
        self._every = energy, time
        self.front_energy, self.energy = energy[:, :measured], energy[:, measured:]
        self.front_time, self.time = time[:, :measured], time[:, measured:]
        self.whole = _hypervolumes(energy, time)
        self._covered = _hypervolumes(self.front_energy, self.front_time)
        missing = 1.0 - self._covered / self.whole
        self.missing = np.where(missing > ROUNDING, missing, 0.0)

    def shares(
        self, front_energy: np.ndarray, front_time: np.ndarray, columns: np.ndarray
    ) -> np.ndarray:
        """Return the share of each draw's hypervolume that each candidate adds to a front."""
        gains = joint_improvement(
            front_energy, front_time, self.energy[:, columns], self.time[:, columns], np.zeros(2)
        )
        return gains / self.whole[:, None]

    def together(self, columns: np.ndarray) -> np.ndarray:
        """Return the share of each draw's hypervolume that all these candidates add, (draws,)."""
        energy = np.hstack([self.front_energy, self.energy[:, columns]])
        time = np.hstack([self.front_time, self.time[:, columns]])
        return (_hypervolumes(energy, time) - self._covered) / self.whole

    def noise(self, time_sd: float, power_sd: float) -> np.ndarray:
        """Return the standard deviation of `whole` as a share of it, (draws,).

        To first order, if each corner of the front has independent errors of log time and log
        power: one of log energy moves its right side, one step of the staircase high, one of log
        time its upper side, too.
        """
        e, t = _by_energy(*self._every)
        before = np.hstack([np.zeros((len(t), 1)), np.minimum.accumulate(t, axis=1)[:, :-1]])
        corner = (t < before) & (e < 0)
        ends = np.hstack([np.where(corner, e, 0.0)[:, 1:], np.zeros((len(e), 1))])
        right = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        width, height = np.where(corner, right - e, 0.0), np.where(corner, before - t, 0.0)
        variance = (time_sd * (width + height)) ** 2 + (power_sd * height) ** 2
        return np.asarray(np.sqrt(variance.sum(axis=1)) / self.whole)

    @property
    def saving(self) -> np.ndarray:
        """What is missing as a fall of log energy, averaged over the front's times, (draws,)."""
        return np.asarray(self.missing * self.whole / -self._every[1].min(axis=1))

    def reduction(self, shares: np.ndarray) -> np.ndarray:
        """Return the fall of log(regret + `LEAST_REGRET`) if these shares are added."""
        missing = self.missing.reshape(-1, *[1] * (shares.ndim - 1))
        left = np.maximum(missing - shares, 0.0)
        return np.asarray(np.log((missing + LEAST_REGRET) / (left + LEAST_REGRET)))


def _reference(figure: np.ndarray, other: np.ndarray) -> np.ndarray:
    nadir = np.take_along_axis(figure, other.argmin(axis=1)[:, None], axis=1)[:, 0]
    width = nadir - figure.min(axis=1)
    return np.asarray(nadir + np.maximum(REFERENCE_MARGIN * width, REFERENCE_LEAST))


def _hypervolumes(energy: np.ndarray, time: np.ndarray) -> np.ndarray:
    e, t = _by_energy(energy, time)
    right = np.hstack([e[:, 1:], np.zeros((len(e), 1))])
    return np.asarray(np.sum((right - e) * -np.minimum.accumulate(t, axis=1), axis=1))


def _by_energy(energy: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(energy, axis=1)
    e, t = (np.take_along_axis(figure, order, axis=1) for figure in (energy, time))
    return np.minimum(e, 0.0), np.minimum(t, 0.0)
