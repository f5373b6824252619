"""The power timeline: samples of a meter's power.

It draws the picture only; a window's energy comes from the meter's counter. It runs in the agent,
outside the training processes. A sample that could not be taken is counted, never made up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from tuner.workload.node.meters.base import Meter, MeterError
from tuner.workload.records.probe import PowerSample


class Ticker:
    """Thread that calls `action` every `period_s` seconds; `lost` counts the missed calls.

    It keeps to the grid start + k x period, so that a late call does not shift those after it.
    """

    def __init__(self, action: Callable[[], None], *, period_s: float, name: str) -> None:
        self.lost = 0
        self._action = action
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._action()
            due_s += self._period_s
            late = int((time.monotonic() - due_s) / self._period_s)
            if late > 0:
                self.lost += late
                due_s += late * self._period_s

    def stop(self) -> None:
        """End the thread and wait for the call in progress. May be called twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


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
        self.meter, self._state = meter, state
        self._samples: list[PowerSample] = []
        self._ticker = Ticker(self._tick, period_s=period_s, name="joulefront-timeline")

    def _tick(self) -> None:
        try:
            sample = self.meter.sample()
            if self._state is not None:
                sample = replace(sample, extra={**sample.extra, **self._state()})
            self._samples.append(sample)
        except MeterError as error:
            self.errors.append(str(error))
        except Exception as error:  # of a vendor's library: the next sample may be right
            self.errors.append(f"{type(error).__name__}: {error}")
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
