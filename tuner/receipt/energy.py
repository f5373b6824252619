"""Energy of a measured command over time, and the state of its devices meanwhile.

The meter is read once a second while the command runs. The energy at another moment, such as the
end of the first step, lies on the line between two readings.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.workload.node.host import busy_ticks
from tuner.workload.node.meters import Reading
from tuner.workload.node.meters.base import device_states
from tuner.workload.records.probe import PowerSample

#: Readings that are kept: a moment that lies further back has been asked for before.
_KEPT = 600


class EnergyCurve:
    """Energy since the first reading, at requested times."""

    def __init__(self, opened: Reading) -> None:
        self.opened = self.last = opened
        self._readings = deque([opened], maxlen=_KEPT)
        self._finite: dict[float, float] = {}

    def add(self, reading: Reading) -> None:
        if reading.time_s > self.last.time_s:
            self._readings.append(reading)
            self.last = reading

    @property
    def energy_J(self) -> float:
        """Energy from the first to the last reading."""
        return self.last.energy_J - self.opened.energy_J

    @property
    def time_s(self) -> float:
        """Time from the first to the last reading."""
        return self.last.time_s - self.opened.time_s

    def energy_at(self, time_s: float) -> float:
        """Return the energy from the first reading to this moment, at most to the last one."""
        if time_s not in self._finite:
            energy_J = self._interpolated(time_s) - self.opened.energy_J
            if time_s > self.last.time_s:
                return energy_J
            self._finite[time_s] = energy_J
        return self._finite[time_s]

    def _interpolated(self, time_s: float) -> float:
        at = bisect_left(self._readings, time_s, key=lambda reading: reading.time_s)
        if at in (0, len(self._readings)):
            return self._readings[min(at, len(self._readings) - 1)].energy_J
        before, after = self._readings[at - 1], self._readings[at]
        share = (time_s - before.time_s) / (after.time_s - before.time_s)
        return before.energy_J + share * (after.energy_J - before.energy_J)

    def forget(self, kept: set[float]) -> None:
        """Keep the energies of these moments alone."""
        self._finite = {time_s: self._finite[time_s] for time_s in kept if time_s in self._finite}


@dataclass(frozen=True)
class DeviceShare:
    """Mean power of a device, and its shares of time idle and throttled; NaN if unknown."""

    name: str
    mean_W: float
    idle: float
    throttled: float


class _Sum:
    # Integrals over the time in which a quantity was known.

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def add(self, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + seconds * value
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def mean(self, name: str) -> float:
        seconds = self._seconds.get(name, 0.0)
        return self._totals[name] / seconds if seconds else math.nan


class DeviceTotals:
    """Means over the samples of a meter, by device, each sample for the time since the last one."""

    def __init__(self, time_s: float, *, is_gpu: bool) -> None:
        self._last_s, self._is_gpu = time_s, is_gpu
        self._sums: dict[int, _Sum] = {}
        self._cores = _CoreUse()

    def add(self, sample: PowerSample) -> None:
        seconds, self._last_s = max(0.0, sample.time_s - self._last_s), sample.time_s
        states = device_states(sample) or {0: {"power_W": sample.power_W, **sample.extra}}
        for number, state in states.items():
            throttles = [state[name] for name in state if name.startswith("throttle")]
            values = {n: value for n, value in state.items() if n in ("power_W", "utilisation")}
            values |= {"throttled": max(throttles)} if throttles else {}
            self._sums.setdefault(number, _Sum()).add(seconds, values)

    def shares(self, mean_W: float) -> tuple[DeviceShare, ...]:
        """Return the devices. Their powers add up to `mean_W`, which the energy counter gives."""
        if not self._is_gpu:
            return (DeviceShare("cores", mean_W, self._cores.idle_share(), math.nan),)
        sampled = {number: each.mean("power_W") for number, each in self._sums.items()}
        total_W = math.fsum(sampled.values())
        return tuple(
            DeviceShare(
                f"GPU {number}",
                mean_W * sampled[number] / total_W if total_W else math.nan,
                1.0 - each.mean("utilisation"),
                each.mean("throttled"),
            )
            for number, each in sorted(self._sums.items())
        )


class _CoreUse:
    # Use of the cores that this process may use, by any process, from construction on.

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._before = self._ticks()
        self._began_s = time.monotonic()

    def _ticks(self) -> dict[int, int]:
        with contextlib.suppress(OSError, ValueError):
            return busy_ticks(self._cores)
        return {}

    def idle_share(self) -> float:
        now = self._ticks()
        seconds = (time.monotonic() - self._began_s) * len(self._cores)
        if not now or not self._before or seconds <= 0:
            return math.nan
        busy = sum(max(0, ticks - self._before.get(core, ticks)) for core, ticks in now.items())
        return min(1.0, max(0.0, 1.0 - busy / os.sysconf("SC_CLK_TCK") / seconds))
