"""Joules from sampled power, and power from a counter of joules, for sources with one of them.

Joules are trapezoids between samples, which a thread of the meter takes often enough; those drawn
during a gap in the samples are unknown, and an error rather than a guess.
"""

from __future__ import annotations

import threading
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

    def __init__(self, power_W: Callable[[], float], now_s: float) -> None:
        self._power_W = power_W
        self._total_J = 0.0
        self._last = (now_s, power_W())

    def energy_J(self, now_s: float) -> float:
        """Add what was drawn since the last sample; LostJoules if that is over `SILENT_S` ago."""
        last_s, last_W = self._last
        power_W = self._power_W()
        if now_s - last_s > SILENT_S:
            raise LostJoules(f"the GPU's power was not sampled for {now_s - last_s:.1f} s")
        self._total_J += max(0.0, now_s - last_s) * (last_W + power_W) / 2
        self._last = (max(now_s, last_s), power_W)
        return self._total_J


class CounterMeter:
    """Meter by a counter of joules that is fine enough to need no wait at a window's edge.

    A subclass counts. Power is the slope between two samples; two closer than `min_s` say little.
    """

    def __init__(
        self,
        name: str,
        *,
        min_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._name, self._min_s = name, min_s
        self._clock, self._sleep = clock, sleep
        self._lock, self._sampling = threading.Lock(), threading.Lock()
        self._closed = False
        self._last = self.read()

    def _count(self) -> Reading:
        raise NotImplementedError

    def read(self) -> Reading:
        with self._lock:
            if self._closed:
                raise MeterError(f"the {self._name} meter is closed")
            return self._count()

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        """Return the mean power since the previous sample (since opening, for the first), watts."""
        with self._sampling:
            reading = self.read()
            while (elapsed_s := reading.time_s - self._last.time_s) < self._min_s:
                self._sleep(self._min_s)
                reading = self.read()
            power_W = (reading.energy_J - self._last.energy_J) / elapsed_s
            self._last = reading
            return PowerSample(reading.time_s, power_W)

    def close(self) -> None:
        with self._lock:
            self._closed = True
