"""The live settings of one launch, as far as they are expected to be visited.

A launch is paid once and a further setting costs its window, so a launch is worth what all its
settings that are worth their own joules would bring. Which those are is decided after the first
window (`tuner.sampler.CandidateSampler.plan_on`), and here foreseen: a setting whose hopeful
figures, by that window, are beaten on both axes is not visited. So a wide sweep of a launch that
may turn out poor is charged little more than one window. Everything is reckoned over the same joint
draws of the surrogates.
"""

from __future__ import annotations

import numpy as np

from tuner.pareto import joint_improvement

__all__ = ["Sweep", "grow"]

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
        beaten_by: (k, 2), what a setting's hopeful figures are held against after the first window;
            None where that window is behind, or decides nothing: every setting is visited.
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
        self._reference = reference
        self.added: list[int] = []
        #: In which draws each setting is visited once the sweep has it, (draws, settings).
        self.visited = np.ones(energy.shape, dtype=bool)

    def gains(self) -> np.ndarray:
        """What each setting would add to the hypervolume in each draw, (draws, settings)."""
        return self.visited * joint_improvement(
            self._front_e, self._front_t, self.energy, self.time, self._reference
        )

    @property
    def first_decides(self) -> bool:
        """Whether the first window decides about the rest."""
        return self._beaten_by is not None

    @property
    def chance(self) -> np.ndarray:
        """Probability that each setting is visited, (settings,)."""
        return np.asarray(self.visited.mean(axis=0))

    def add(self, setting: int) -> None:
        """Visit this setting too; the first one added decides about the others."""
        if not self.added and self._beaten_by is not None:
            self.visited = self._decided_by(setting)
        self.added.append(setting)
        hidden = np.where(self.visited[:, setting], 0.0, np.inf)[:, None]
        self._front_e = np.hstack([self._front_e, self.energy[:, setting, None] + hidden])
        self._front_t = np.hstack([self._front_t, self.time[:, setting, None] + hidden])

    def decisive(self, visit_J: np.ndarray) -> int:
        """The setting, of the first `ROOTS_TRIED`, whose window leaves the fewest joules to be
        spent on the others."""
        roots = range(min(ROOTS_TRIED, len(visit_J)))
        left_J = [visit_J[r] + visit_J @ self._decided_by(r).mean(axis=0) for r in roots]
        return int(np.argmin(left_J))

    def _decided_by(self, root: int) -> np.ndarray:
        """In which draws each setting is visited when the root's window is the first, (draws,
        settings)."""
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
        return visited


def grow(
    sweep: Sweep, launch_J: float, visit_J: np.ndarray, max_live: int, cost_weight: float
) -> tuple[float, float]:
    """Add settings while each is worth its joules as much as the whole; their joint gain and the
    joules that are expected to be spent.

    Where the first window decides, the first setting is the one whose window is expected to save
    the most; else the one that is worth most.

    Args:
        sweep: against the front as it is measured; added to.
        launch_J: joules of the launch; 0 where it is up.
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
