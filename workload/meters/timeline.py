"""The power timeline: what the meter's power looked like, sample by sample.

It draws the picture only; a window's energy comes from the meter's counter. It runs in the agent,
outside the training processes. A sample that could not be taken is counted, never made up.
"""

from __future__ import annotations

from workload.meters.base import Meter, PowerSample
from workload.meters.errors import MeterError
from workload.meters.ticker import Ticker

__all__ = ["Timeline"]


class Timeline:
    """Samples a meter's power from construction until `stop`.

    Attributes:
        errors: one sentence each sample that the meter refused.
    """

    def __init__(self, meter: Meter, period_s: float = 0.1) -> None:
        self.errors: list[str] = []
        self._meter = meter
        self._samples: list[PowerSample] = []
        self._ticker = Ticker(self._tick, period_s=period_s, name="joulefront-timeline")

    def _tick(self) -> None:
        try:
            self._samples.append(self._meter.sample())
        except MeterError as error:
            self.errors.append(str(error))

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        """Those taken so far."""
        return tuple(self._samples)

    @property
    def lost(self) -> int:
        """Samples missing from the grid: not taken in time, or refused by the meter."""
        return self._ticker.lost + len(self.errors)

    def stop(self) -> tuple[PowerSample, ...]:
        """End the sampling and return every sample. May be called twice."""
        self._ticker.stop()
        return self.samples
