"""Power as the slope of an energy counter, for meters that have no power sensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tuner.workload.meters.base import PowerSample, Reading


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
