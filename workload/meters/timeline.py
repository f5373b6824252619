"""The power timeline: samples of a meter's power.

It draws the picture only; a window's energy comes from the meter's counter. It runs in the agent,
outside the training processes. A sample that could not be taken is counted, never made up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tuner.workload.meters.base import Meter, PowerSample
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.ticker import Ticker


class Timeline:
    """Sampler of a meter's power from construction until `stop`.

    `errors` holds a sentence for each sample that was refused, `busy_s` the processor time of the
    thread.
    """

    def __init__(
        self,
        meter: Meter,
        period_s: float = 0.1,
        *,
        state: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.errors: list[str] = []
        self.busy_s = 0.0
        self._meter, self._state = meter, state
        self._samples: list[PowerSample] = []
        self._ticker = Ticker(self._tick, period_s=period_s, name="joulefront-timeline")

    def _tick(self) -> None:
        try:
            sample = self._meter.sample()
            if self._state is not None:
                sample = replace(sample, extra={**sample.extra, **self._state()})
            self._samples.append(sample)
        except MeterError as error:
            self.errors.append(str(error))
        self.busy_s = time.thread_time()

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        """Samples taken so far."""
        return tuple(self._samples)

    @property
    def lost(self) -> int:
        """Samples missing from the grid: not taken in time, or refused by the meter."""
        return self._ticker.lost + len(self.errors)

    def stop(self) -> tuple[PowerSample, ...]:
        """End the sampling and return every sample. May be called twice."""
        self._ticker.stop()
        return self.samples
