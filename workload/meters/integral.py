"""Joules from sampled power, for sources that have no energy counter.

Trapezoids between the samples, which a thread of the meter takes often enough. Joules drawn during
a gap in the samples are unknown, and an error rather than a guess.
"""

from __future__ import annotations

from collections.abc import Callable

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
