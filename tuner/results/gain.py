"""A saving in the logarithm, as a mixture of normal distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr


@dataclass(frozen=True)
class Gain:
    """Saving in the logarithm: a mixture of normal distributions, (components,) each."""

    means: np.ndarray
    sds: np.ndarray
    weights: np.ndarray

    @classmethod
    def normal(cls, mean: float, sd: float) -> Gain:
        """Return one normal distribution."""
        return cls(np.array([mean]), np.array([max(sd, 1e-9)]), np.ones(1))

    @property
    def mean(self) -> float:
        """Mean of the mixture."""
        return float(self.weights @ self.means)

    @property
    def sd(self) -> float:
        """Standard deviation of the mixture."""
        return math.sqrt(float(self.weights @ (self.sds**2 + (self.means - self.mean) ** 2)))

    def shifted(self, by: float) -> Gain:
        """Return the same saving with a constant added."""
        return Gain(self.means + by, self.sds, self.weights)

    def above(self, margin: float) -> float:
        """Return the probability that it is more than this."""
        found = float(self.weights @ ndtr((self.means - margin) / self.sds))
        return min(max(found, 0.0), 1.0)  # the weights sum to one but for rounding

    def interval(self, share: float) -> tuple[float, float]:
        """Return the central interval that holds this share."""
        tail = (1 - share) / 2
        return self._quantile(tail), self._quantile(1 - tail)

    def _quantile(self, p: float) -> float:
        low = float(np.min(self.means - 9 * self.sds))
        high = float(np.max(self.means + 9 * self.sds))
        for _ in range(60):
            middle = (low + high) / 2
            if 1 - self.above(middle) < p:
                low = middle
            else:
                high = middle
        return (low + high) / 2
