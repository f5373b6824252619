"""Idle power of a node between two launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tuner.workload.meters import Meter

#: A device that has just worked is hot and at its highest clock: its power is that of an idle one
#: only after some seconds. An H100 then draws 20 to 60 % more than later.
COOL_S = 10.0


class IdlePower:
    """Idle power of a node, measured while its devices are cool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_until_s = -math.inf
        self.power_W: float | None = None

    def was_busy(self) -> None:
        """Note that ranks have worked until now."""
        self._busy_until_s = self._clock()

    def measure(
        self, meter: Meter, idle_s: float, wait: Callable[[float], object] = time.sleep
    ) -> float | None:
        """Return the idle power, watts: measured if the devices are cool, else the earlier one.

        Raises:
            MeterError: the meter cannot be read.
        """
        if idle_s <= 0:
            return None
        warm = self._clock() - self._busy_until_s < COOL_S
        if warm and self.power_W is not None:
            return self.power_W
        opened = meter.boundary(opens=True)
        wait(idle_s)
        closed = meter.boundary(opens=False)
        if closed.time_s > opened.time_s:
            self.power_W = (closed.energy_J - opened.energy_J) / (closed.time_s - opened.time_s)
        return self.power_W
