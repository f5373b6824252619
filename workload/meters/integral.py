"""Joules from sampled power, and power from a counter of joules, for sources with one of them.

Trapezoids between the samples, which a thread of the meter takes often enough. Joules drawn during
a gap in the samples are unknown, and an error rather than a guess.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tuner.workload.meters.base import PowerSample, Reading
from tuner.workload.meters.errors import MeterError

#: A counter that has not moved for so long is broken: it updates every 20 to 100 ms
#: (ML.ENERGY blog; arXiv 2312.02741), and no GPU draws nothing. Power that was not sampled for so
#: long leaves joules unknown just the same.
SILENT_S = 2.0


class LostJoules(MeterError):
    """Loss of joules: no later difference of readings would be right."""


class Integral:
    """Joules since construction, by integrating sampled power."""

    def __init__(
        self, power_W: Callable[[], float], now_s: float, whose: str = "the GPU's power"
    ) -> None:
        self._power_W, self._whose = power_W, whose
        self._total_J = 0.0
        self._last = (now_s, power_W())

    def energy_J(self, now_s: float) -> float:
        """Add what was drawn since the last sample; LostJoules if that is over `SILENT_S` ago."""
        last_s, last_W = self._last
        power_W = self._power_W()
        if now_s - last_s > SILENT_S:
            raise LostJoules(f"{self._whose} was not sampled for {now_s - last_s:.1f} s")
        self._total_J += max(0.0, now_s - last_s) * (last_W + power_W) / 2
        self._last = (max(now_s, last_s), power_W)
        return self._total_J


class Slope:
    """Converter of readings of one counter to power; two closer than `min_s` say little."""

    def __init__(
        self,
        read: Callable[[], Reading],
        *,
        min_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read
        self._min_s = min_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._last = read()

    def sample(self) -> PowerSample:
        """Return the mean power since the previous sample (since opening, for the first), watts."""
        with self._lock:
            reading = self._read()
            while (elapsed_s := reading.time_s - self._last.time_s) < self._min_s:
                self._sleep(self._min_s)
                reading = self._read()
            power_W = (reading.energy_J - self._last.energy_J) / elapsed_s
            self._last = reading
            return PowerSample(reading.time_s, power_W)
