"""Change points in step time or power: two-sided cumulative sums of standardised residuals.

Page's test (1954) with reference value 1 and limit 4, in standard deviations: each residual counts
at most 3, so that one odd window is no change and two clear ones are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE, LIMIT, MOST = 1.0, 4.0, 3.0
#: Relative change that is not worth a restart, added to the standard deviation of a residual.
TOLERANCE = 0.003
#: A change is reported from this mean relative size on.
LEAST = 0.01


@dataclass(frozen=True)
class Change:
    """Change of the job or the machine at a constant setting.

    Attributes:
        quantity: "step time" or "power".
        since: number of the first window after it.
        relative: its estimated size; 0.2 is 20 % more.
        step: number of steps done when it was noticed.
    """

    quantity: str
    since: int
    relative: float
    step: int = 0


@dataclass
class _Side:
    sum: float = 0.0
    since: int = 0
    total: float = 0.0
    count: int = 0

    def add(self, number: int, standard: float, residual: float) -> bool:
        raised = self.sum + min(standard, MOST) - REFERENCE
        if raised <= 0:
            self.sum, self.total, self.count = 0.0, 0.0, 0
            return False
        if self.sum == 0:
            self.since = number
        self.sum, self.total, self.count = raised, self.total + residual, self.count + 1
        return self.sum >= LIMIT and self.total / self.count >= LEAST


class ChangeDetector:
    """Detector of changes in one quantity."""

    def __init__(self, quantity: str) -> None:
        self._quantity = quantity
        self.reset()

    def reset(self) -> None:
        """Forget the residuals so far."""
        self._sides = {1: _Side(), -1: _Side()}

    def add(self, number: int, residual: float, deviation: float) -> Change | None:
        """Add the residual of a window; return the change that it reveals, or None.

        Args:
            residual: logarithm of the measured over the predicted value.
            deviation: its standard deviation, prediction and noise together.
        """
        standard = residual / math.hypot(deviation, TOLERANCE)
        for sign, side in self._sides.items():
            if side.add(number, sign * standard, sign * residual):
                relative = math.expm1(sign * side.total / side.count)
                return Change(self._quantity, side.since, relative)
        return None
