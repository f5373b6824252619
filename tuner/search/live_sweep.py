"""Sweep over the live settings of one launch, as far as they are expected to be visited.

The probe decides after each window whether to continue (`CandidateSampler.plan_continuation`), and
the sweep foresees that: a setting is visited in the draws in which it is of value. So a wide sweep
of a launch that may turn out poor is charged little more than one window.
"""

from __future__ import annotations

import numpy as np

from tuner.models.surrogate.ties import TOLERANCE, first_best
from tuner.search.log_regret import LEAST_REGRET, LogRegret


class Sweep:
    """Settings of one launch that a probe visits, their value and their expected cost.

    Args:
        launch_J: joules of the launch if it begins at each setting, (settings,); zeros if it is
            running.

    Attributes:
        added: the settings that the probe visits; the first is visited first.
    """

    def __init__(
        self,
        regret: LogRegret,
        columns: np.ndarray,
        launch_J: np.ndarray,
        visit_J: np.ndarray,
    ) -> None:
        self._regret, self._columns = regret, columns
        self._launch_J, self._visit_J = launch_J, visit_J
        self._front_e, self._front_t = regret.front_energy, regret.front_time
        self._share = np.zeros(len(regret.missing))
        self._chance = np.ones(len(columns))
        self.added: list[int] = []
        self.value, self.cost_J = 0.0, float(launch_J.min())

    @property
    def first_J(self) -> float:
        """Joules until the first setting is visited."""
        return float(self._launch_J[self.added[0]] + self._visit_J[self.added[0]])

    @property
    def expected_share(self) -> float:
        """Share of the front's hypervolume that the settings are expected to add."""
        return float(self._share.mean())

    @property
    def needed(self) -> float:
        """Probability that the launch's settings add more than the least regret together."""
        return float(np.mean(self._regret.together(self._columns) > LEAST_REGRET))

    def grow(self, most: int, cost_weight: float) -> None:
        """Add settings while each is worth as much per joule as the whole sweep."""
        rate, least = 0.0, 1 + TOLERANCE
        while len(self.added) < min(most, len(self._columns)):
            shares = self._share[:, None] + self._regret.shares(
                self._front_e, self._front_t, self._columns
            )
            values = self._regret.reduction(shares)
            added = values - self._regret.reduction(self._share)[:, None]
            chance = (
                np.ones(len(self._columns)) if not self.added else (added > TOLERANCE).mean(axis=0)
            )
            expected_J = np.maximum(self._visit_J * chance, 1e-12)
            more = values.mean(axis=0)
            rates = more / (self.cost_J + expected_J) ** cost_weight
            rates[self.added] = -1.0
            best = first_best(rates)
            if self.added and (more[best] <= least * self.value or rates[best] <= least * rate):
                return
            self._add(best, shares[:, best], float(expected_J[best]))
            rate = max(rate, self.value / self.cost_J**cost_weight)

    def _add(self, setting: int, share: np.ndarray, expected_J: float) -> None:
        self._chance[setting] = expected_J / self._visit_J[setting]
        column = self._columns[[setting]]
        self._front_e = np.hstack([self._front_e, self._regret.energy[:, column]])
        self._front_t = np.hstack([self._front_t, self._regret.time[:, column]])
        self._share = share
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
