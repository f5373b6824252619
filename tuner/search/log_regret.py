"""Fall of the log regret: the worth of a measurement, draw by draw.

In each joint draw of the surrogates the regret is the share of that draw's front that the
measurements miss, and a measurement is worth the fall of its logarithm. So a draw in which a launch
misses the front by far weighs no more than one in which the last settings of a good launch are
missing. (Hypervolume improvement leaves such a launch for the most uncertain one, and returns.)

A probe decides after each window of its launch whether to continue, and `Sweep` foresees that: a
setting is visited in the draws in which it is of value. So a wide sweep of a launch that may turn
out poor is charged little more than one window.
"""

from __future__ import annotations

import numpy as np

from tuner.models.surrogate.ties import TOLERANCE, first_best
from tuner.pareto import REFERENCE_LEAST, REFERENCE_MARGIN, joint_improvement

#: Added to the regret before its logarithm is taken, a share of the front's hypervolume: what a
#: search may miss when it ends by default is hardly worth finding.
LEAST_REGRET = 0.02
#: Share below which a difference of two sums of areas is rounding.
ROUNDING = 1e-12


class LogRegret:
    """Value of open candidates in each joint draw, given the measured ones.

    Each draw has a reference point of its own, beyond the nadir of its front
    (`tuner.pareto.reference_point`), which is the origin of the coordinates here.
    `energy` and `time` are joint draws of the logarithms, (draws, measured + open): the first
    `measured` configurations are measured or in flight.
    """

    def __init__(self, energy: np.ndarray, time: np.ndarray, *, measured: int) -> None:
        energy = energy - _reference(energy, time)[:, None]
        time = time - _reference(time, energy)[:, None]
        self._every = energy, time
        self.front_energy, self.energy = energy[:, :measured], energy[:, measured:]
        self.front_time, self.time = time[:, :measured], time[:, measured:]
        self.whole = _hypervolumes(energy, time)  # of each draw's front, (draws,)
        self._covered = _hypervolumes(self.front_energy, self.front_time)
        missing = 1.0 - self._covered / self.whole
        # Regret before any open candidate is measured, (draws,).
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
        """Return the relative standard deviation of `whole`, (draws,).

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
        """Missing share as a fall of log energy, averaged over the front's times, (draws,)."""
        return np.asarray(self.missing * self.whole / -self._every[1].min(axis=1))

    def reduction(self, shares: np.ndarray) -> np.ndarray:
        """Return the fall of log(regret + `LEAST_REGRET`) if these shares are added."""
        missing = self.missing.reshape(-1, *[1] * (shares.ndim - 1))
        left = np.maximum(missing - shares, 0.0)
        return np.asarray(np.log((missing + LEAST_REGRET) / (left + LEAST_REGRET)))


class Sweep:
    """Settings of one launch that a probe visits, their value and their expected cost.

    `launch_J`, (settings,), are joules of the launch if it begins at each; zeros if it is running.
    """

    def __init__(
        self, regret: LogRegret, columns: np.ndarray, launch_J: np.ndarray, visit_J: np.ndarray
    ) -> None:
        self._regret, self._columns = regret, columns
        self._launch_J, self._visit_J = launch_J, visit_J
        self._front_e, self._front_t = regret.front_energy, regret.front_time
        self.share = np.zeros(len(regret.missing))  # of the hypervolume that they add, (draws,)
        self._chance = np.ones(len(columns))
        self.added: list[int] = []  # the settings, in the order of their visits
        self.value, self.cost_J = 0.0, float(launch_J.min())

    @property
    def first_J(self) -> float:
        """Joules until the first setting is visited."""
        return float(self._launch_J[self.added[0]] + self._visit_J[self.added[0]])

    @property
    def needed(self) -> float:
        """Probability that the launch's settings add more than the least regret together."""
        return float(np.mean(self._regret.together(self._columns) > LEAST_REGRET))

    def grow(self, most: int) -> None:
        """Add settings while each is worth as much per joule as the whole sweep."""
        rate, least = 0.0, 1 + TOLERANCE
        while len(self.added) < min(most, len(self._columns)):
            shares = self.share[:, None] + self._regret.shares(
                self._front_e, self._front_t, self._columns
            )
            values = self._regret.reduction(shares)
            added = values - self._regret.reduction(self.share)[:, None]
            chance = (added > TOLERANCE).mean(axis=0) if self.added else 1.0
            expected_J = np.maximum(self._visit_J * chance, 1e-12)
            more = values.mean(axis=0)
            rates = more / (self.cost_J + expected_J)
            rates[self.added] = -1.0
            best = first_best(rates)
            if self.added and (more[best] <= least * self.value or rates[best] <= least * rate):
                return
            self._add(best, shares[:, best], float(expected_J[best]))
            rate = max(rate, self.value / self.cost_J)

    def _add(self, setting: int, share: np.ndarray, expected_J: float) -> None:
        self._chance[setting] = expected_J / self._visit_J[setting]
        column = self._columns[[setting]]
        self._front_e = np.hstack([self._front_e, self._regret.energy[:, column]])
        self._front_t = np.hstack([self._front_t, self._regret.time[:, column]])
        self.share = share
        self.added.append(setting)
        self.value = float(self._regret.reduction(share).mean())
        self.cost_J += expected_J

    def begin_cheaply(self) -> None:
        """Begin at the setting at which the whole probe is expected to cost the least.

        It need not be worth its own window: where power is low, a launch and a window that rule
        the launch out are cheap.
        """
        begin_J = self._launch_J + self._visit_J
        begin_J[self.added] -= self._chance[self.added] * self._visit_J[self.added]
        first = first_best(-begin_J)
        self.added = [first, *(setting for setting in self.added if setting != first)]


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
