"""The live settings of one launch that a probe is built of.

A launch is paid once, so a sweep takes along what is worth its own joules and what would probably
cost another launch later. Its first window decides about the rest: a setting whose hopeful figures
are then beaten on both axes is passed over (`workload.probe.GiveUp`), so a wide sweep of a launch
that turns out poor costs little more than one window. Everything is reckoned over the same joint
draws of the surrogates.
"""

from __future__ import annotations

import numpy as np

from tuner.pareto import hypervolume, joint_improvement
from workload.probe import GiveUp

__all__ = ["Sweep", "finish", "grow"]

#: A live setting is added while its own gain per joule is at least this share of the whole probe's:
#: far below 1 because what is left out today costs a launch of its own later.
RELAUNCH_SHARE = 0.3
#: A setting is needed where it adds this share of the hypervolume; coming back for what is needed
#: is taken to cost so many launches (one is often come back to more than once). See `finish`.
NEEDED_GAIN, NEEDED_LAUNCHES = 0.0005, 2.0
#: A setting's hopeful figures lie so many standard deviations below what the first window lets
#: expect of it.
HOPE_SD = 1.0
#: Settings that are tried as the first of a sweep: those with the most to gain.
ROOTS_TRIED = 8


class Sweep:
    """The settings of one launch, those that a probe visits, and the fronts they are added to.

    Args:
        energy: joint draws of the settings' log energy, (draws, settings).
        time: of log time.
        front: (n, 2), log energy and log time that they must improve on, the same in every draw.
        reference: (2,).
        beaten_by: (k, 2), what passes over a setting after the first window; None passes over none.
        noise: standard deviation of one window's log time and of its log power.
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
        self._reference, self._hypervolume = reference, hypervolume(front, reference)
        self.added: list[int] = []
        #: In which draws each setting is visited once the sweep has it, (draws, settings).
        self.visited = np.ones(energy.shape, dtype=bool)
        self._reach = np.zeros((energy.shape[1], 2))

    def gains(self) -> np.ndarray:
        """What each setting would add to the hypervolume in each draw, (draws, settings)."""
        return self.visited * joint_improvement(
            self._front_e, self._front_t, self.energy, self.time, self._reference
        )

    @property
    def hypervolume(self) -> float:
        """Of the front that the settings are added to."""
        return self._hypervolume

    @property
    def may_give_up(self) -> bool:
        """Whether the first window may decide about the rest."""
        return self._beaten_by is not None

    @property
    def chance(self) -> np.ndarray:
        """Probability that each setting is visited, (settings,)."""
        return np.asarray(self.visited.mean(axis=0))

    def add(self, setting: int) -> None:
        """Visit this setting too; the first one added decides about the others."""
        if not self.added and self._beaten_by is not None:
            self._reach, self.visited = self._decided_by(setting)
        self.added.append(setting)
        self._extend(setting)

    def keep(self, count: int) -> None:
        """Visit only the first `count` of those added."""
        del self.added[count:]

    def _extend(self, setting: int) -> None:
        hidden = np.where(self.visited[:, setting], 0.0, np.inf)[:, None]
        self._front_e = np.hstack([self._front_e, self.energy[:, setting, None] + hidden])
        self._front_t = np.hstack([self._front_t, self.time[:, setting, None] + hidden])

    def decisive(self, visit_J: np.ndarray) -> int:
        """The setting, of the first `ROOTS_TRIED`, whose window leaves the fewest joules to be
        spent on the others."""
        roots = range(min(ROOTS_TRIED, len(visit_J)))
        left_J = [visit_J[r] + visit_J @ self._decided_by(r)[1].mean(axis=0) for r in roots]
        return int(np.argmin(left_J))

    def _decided_by(self, root: int) -> tuple[np.ndarray, np.ndarray]:
        """When the root's window is the first: each setting's reach, (settings, 2), and in which
        draws it is visited, (draws, settings)."""
        reach = np.empty((self.energy.shape[1], 2))
        power = self.energy - self.time
        for axis, (figure, noise) in enumerate(zip((self.time, power), self._noise, strict=True)):
            apart = figure - figure[:, [root]]
            spread = np.hypot(apart.std(axis=0), noise)
            reach[:, axis] = apart.mean(axis=0) - HOPE_SD * spread
        hopeful_t = self.time[:, [root]] + reach[:, 0]
        hopeful_e = self.energy[:, [root]] + reach.sum(axis=1)
        visited = np.ones(self.energy.shape, dtype=bool)
        for front_e, front_t in self._beaten_by if self._beaten_by is not None else ():
            visited &= (hopeful_e <= front_e) | (hopeful_t <= front_t)
        visited[:, root] = True
        return reach, visited

    def give_up(self) -> GiveUp | None:
        """The rule that goes with the probe; None where there is nothing to decide."""
        if self._beaten_by is None or len(self.added) < 2:
            return None
        return GiveUp(
            front=tuple((float(np.exp(t)), float(np.exp(e))) for e, t in self._beaten_by),
            reach=tuple((float(np.exp(t)), float(np.exp(p))) for t, p in self._reach[self.added]),
        )


def grow(
    sweep: Sweep, launch_J: float, visit_J: np.ndarray, max_live: int, cost_weight: float
) -> tuple[float, float]:
    """Add settings while each is worth its own joules; returns their joint gain and the joules.

    With a rule to give up by, the first is the setting whose window is expected to save the most;
    without, the one that is worth most.

    Args:
        sweep: against the front as it is measured; added to.
        launch_J: joules of the launch.
        visit_J: joules of each setting, (settings,).
        max_live: at most so many.
        cost_weight: exponent of the cost.
    """
    total, joules, rate = 0.0, float(launch_J), 0.0
    while len(sweep.added) < min(max_live, len(visit_J)):
        gains = sweep.gains().mean(axis=0)
        expected_J = np.maximum(visit_J * sweep.chance, 1e-12)
        rates = (total + np.maximum(gains, 0.0)) / (joules + expected_J) ** cost_weight
        rates[sweep.added] = -1.0
        best = int(np.argmax(rates))
        if not sweep.added and sweep.may_give_up:
            best = sweep.decisive(visit_J)
        worth = gains[best] / expected_J[best] ** cost_weight
        if sweep.added and (gains[best] <= 0 or worth < RELAUNCH_SHARE * rate):
            break
        sweep.add(best)
        total, joules = total + max(float(gains[best]), 0.0), joules + float(expected_J[best])
        rate = max(rate, total / joules**cost_weight)
    return total, joules


def finish(sweep: Sweep, launch_J: float, visit_J: np.ndarray, max_live: int) -> float:
    """Add the settings that had better be visited now than later; returns their joules.

    Of the sets that grow by the most needed setting, the one that is expected to cost the least
    in all: what it visits now, and in the draws where a setting that it leaves out turns out to be
    needed, `NEEDED_LAUNCHES` launches and the visits of the needed ones. A setting is needed where
    it adds `NEEDED_GAIN` of the hypervolume.
    """
    least = NEEDED_GAIN * sweep.hypervolume
    start, spent = len(sweep.added), [0.0]
    best, best_J = start, np.inf
    while True:
        needed = sweep.gains() > least
        needed[:, sweep.added] = False
        later_J = NEEDED_LAUNCHES * launch_J * needed.any(axis=1).mean()
        later_J += float(needed.mean(axis=0) @ visit_J)
        if spent[-1] + later_J < best_J - 1e-9:
            best, best_J = len(sweep.added), spent[-1] + later_J
        if len(sweep.added) >= min(max_live, len(visit_J)) or not needed.any():
            break
        setting = int(np.argmax(needed.mean(axis=0)))
        spent.append(spent[-1] + float(visit_J[setting] * sweep.chance[setting]))
        sweep.add(setting)
    sweep.keep(best)
    return spent[best - start]
