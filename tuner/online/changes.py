"""Change points in step time or power: two-sided cumulative sums of standardised residuals.

Page's test (1954) with reference value 1 and limit 4, in standard deviations: each residual counts
at most 3, so that one odd window is no change and two clear ones are.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

REFERENCE, LIMIT, MOST = 1.0, 4.0, 3.0
#: Relative change that is not worth a restart, added to the standard deviation of a residual.
TOLERANCE = 0.003
#: A change is reported from this mean relative size on.
LEAST = 0.01


Quantity = Literal["step time", "power"]


@dataclass(frozen=True)
class Change:
    """Change of the job or the machine at a constant setting.

    Attributes:
        since: number of the first window after it.
        relative: its estimated size; 0.2 is 20 % more.
        step: number of steps done when it was noticed.
    """

    quantity: Quantity
    since: int
    relative: float
    step: int = 0


class ChangeDetector:
    """Detector of changes in one quantity."""

    def __init__(self, quantity: Quantity) -> None:
        self._quantity = quantity
        self.reset()

    def reset(self) -> None:
        """Forget the residuals so far."""
        # Of each side, the windows of its present sum: number, summand, residual.
        self._sides: dict[int, list[tuple[int, float, float]]] = {1: [], -1: []}

    def add(self, number: int, residual: float, deviation: float) -> Change | None:
        """Add the residual of a window; return the change that it reveals, or None.

        Args:
            residual: logarithm of the measured over the predicted value.
            deviation: its standard deviation, prediction and noise together.
        """
        standard = residual / math.hypot(deviation, TOLERANCE)
        for sign, side in self._sides.items():
            side.append((number, min(sign * standard, MOST) - REFERENCE, sign * residual))
            (since, *_), total = side[0], sum(summand for _, summand, _ in side)
            mean = statistics.fmean(each for _, _, each in side)
            if total <= 0:
                side.clear()
            elif total >= LIMIT and mean >= LEAST:
                return Change(self._quantity, since, math.expm1(sign * mean))
        return None
