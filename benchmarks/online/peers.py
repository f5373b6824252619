"""Policies to compare with: Zeus's sweep at the start, UCB and epsilon-greedy.

Each is given the promise, too: a setting whose mean step time was measured beyond it is not chosen.
All decide after `WINDOW` steps and leave the first steps after a switch out of their means.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod

#: Steps of a window, and those after a switch that do not count.
WINDOW, SETTLE = 20, 4


class _Bandit(ABC):
    def __init__(self, settings: int, max_slowdown: float) -> None:
        self._limit = 1 + max_slowdown
        self.steps, self.seconds, self.energy_J = ([0.0] * settings for _ in range(3))
        self.pulls = [0] * settings
        self._setting, self._left, self._settle = 0, WINDOW, 0

    def add(self, steps: int, seconds: float, energy_J: float) -> int:
        """Take a few steps; return the setting for the next."""
        if self._settle > 0:
            self._settle -= steps
            return self._setting
        self.steps[self._setting] += steps
        self.seconds[self._setting] += seconds
        self.energy_J[self._setting] += energy_J
        self._left -= steps
        if self._left <= 0:
            self.pulls[self._setting] += 1
            wanted = self.choose()
            self._settle = SETTLE if wanted != self._setting else 0
            self._setting, self._left = wanted, WINDOW
        return self._setting

    def kept(self) -> list[int]:
        """Return the measured settings within the promise by their means."""
        top_s = self.seconds[0] / self.steps[0]
        measured = [i for i, steps in enumerate(self.steps) if steps]
        return [i for i in measured if self.seconds[i] / self.steps[i] <= self._limit * top_s]

    def cost(self, setting: int) -> float:
        """Return the mean energy of a step as a share of the highest setting's."""
        top_J = self.energy_J[0] / self.steps[0]
        return self.energy_J[setting] / self.steps[setting] / top_J

    @abstractmethod
    def choose(self) -> int:
        """Return the setting of the next window."""


class ZeusSweep(_Bandit):
    """Each setting once from the highest down, two windows each, then the best one for good.

    As Zeus's GlobalPowerLimitOptimizer with its optimum under a maximum slowdown.
    """

    def choose(self) -> int:
        if self.pulls[self._setting] < 2 and 0 in self.pulls:
            return self._setting
        if 0 in self.pulls:
            return self.pulls.index(0)
        return min(self.kept(), key=self.cost)


class Ucb(_Bandit):
    """Lower confidence bound of the energy (UCB1), the bonus scaled to 5 % of the energy."""

    def choose(self) -> int:
        if 0 in self.pulls:
            return self.pulls.index(0)
        total = sum(self.pulls)
        return min(
            self.kept(),
            key=lambda i: self.cost(i) - 0.05 * math.sqrt(2 * math.log(total) / self.pulls[i]),
        )


class EpsilonGreedy(_Bandit):
    """The best setting by the means, and a random one in 5 % of the windows."""

    def __init__(self, settings: int, max_slowdown: float, seed: int) -> None:
        super().__init__(settings, max_slowdown)
        self._random = random.Random(seed)

    def choose(self) -> int:
        if 0 in self.pulls:
            return self.pulls.index(0)
        if self._random.random() < 0.05:
            return self._random.randrange(len(self.pulls))
        return min(self.kept(), key=self.cost)
