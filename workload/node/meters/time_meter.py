"""Time alone: the substitute for a meter where devices report neither energy nor power.

Slices of a GPU (MIG, vGPU) share its meter with others, and a study that minimizes time needs none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from tuner.workload.node.meters.base import TIME_ALONE, CounterMeter, MeterError, Reading
from tuner.workload.node.meters.gpus import on_twin
from tuner.workload.records.probe import STAND_IN_W, MeterInfo, PowerSample

#: What a user does about devices whose energy cannot be metered.
REMEDY = "tuner optimize --minimize time, with no limit on energy or power, tunes time alone"


class NoEnergy(MeterError):
    """Reason of devices that report neither energy nor power, whatever the permissions."""


class TimeMeter(CounterMeter):
    """Stand-in for a meter, of scope "none"; `why` there is no energy is its source."""

    def __init__(self, why: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock_s, self._start_s = clock, clock()
        self.info = MeterInfo("time", "none", why, twin=on_twin())
        self.resolution_s = 1e-6
        super().__init__("time", min_s=0.0, clock=clock, sleep=time.sleep)

    def _count(self) -> Reading:
        now_s = self._clock_s()
        return Reading(now_s, STAND_IN_W * (now_s - self._start_s))

    def sample(self) -> PowerSample:
        """Raise MeterError: there is no power to sample."""
        raise MeterError(f"no power is told: {self.info.source}")


@contextlib.contextmanager
def time_alone(permitted: bool) -> Iterator[None]:
    """Let studies run on devices without energy, if `permitted`, until the context ends."""
    before = os.environ.get(TIME_ALONE)
    if permitted:
        os.environ[TIME_ALONE] = "1"
    try:
        yield
    finally:
        if permitted and before is None:
            del os.environ[TIME_ALONE]


def permits_time_alone(environ: Mapping[str, str]) -> bool:
    """Return True if the current study is of time only."""
    return bool(environ.get(TIME_ALONE))
