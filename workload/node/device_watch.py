"""A node's devices between two launches and during one: idle power, damage, and other processes.

CUDA reports a damaged GPU by errors that programs cause, too ("illegal memory access"), so that its
sentence alone would blame the configuration: a probe that fails while a counter of damage moves has
failed by the node.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence

from tuner.search_spaces.errors import InputError
from tuner.workload.node.measure.window import ProbeFailed
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.platforms.base import Counters, Platform
from tuner.workload.records.probe import Failure, PowerSample

#: A device that has just worked is hot and at its highest clock: its power is that of an idle one
#: only after some seconds. An H100 then draws 20 to 60 % more than later.
COOL_S = 10.0


class IdlePower:
    """Idle power of a node, measured while its devices are cool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_until_s = -math.inf
        self.power_W: float | None = None
        self.sampled_W: float | None = None

    def was_busy(self) -> None:
        """Note that ranks have worked until now."""
        self._busy_until_s = self._clock()

    def measure(
        self,
        meter: Meter,
        idle_s: float,
        wait: Callable[[float], object] = time.sleep,
        *,
        samples: Callable[[], Sequence[PowerSample]] = tuple,
    ) -> float | None:
        """Return the idle power, watts: measured if the devices are cool, else the earlier one.

        `sampled_W` is then the mean of the power samples of that time.
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
            sampled_W = [s.power_W for s in samples() if s.time_s >= opened.time_s]
            self.sampled_W = statistics.mean(sampled_W) if sampled_W else None
        return self.power_W


def more_faults(before: Counters, after: Counters) -> dict[str, dict[str, int]]:
    """Return by how much each counter of a device rose between two answers of `Platform.faults`."""
    found: dict[str, dict[str, int]] = {}
    for uuid, counters in before.items():
        for name, count in after.get(uuid, {}).items():
            if (more := count - counters.get(name, count)) > 0:  # not told before: not new
                found.setdefault(uuid, {})[name] = more
    return found


def new_faults(before: Counters, after: Counters) -> str:
    """Return the change of devices between two results of `Platform.faults`, or ""."""
    more = more_faults(before, after)
    found = []
    for uuid in before:
        if uuid not in after:
            found.append(f"{uuid} cannot be used any more")
        found += [f"{uuid} has {count} more {name}" for name, count in more.get(uuid, {}).items()]
    return "; ".join(found)


class DeviceWatch:
    """Watch of a platform's devices from construction on."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before = platform.faults()

    def require_free(self) -> None:
        """Raise ProbeFailed, by the node, if another process uses a device or none answers."""
        try:
            busy = "; ".join(self._platform.busy())
        except (InputError, MeterError) as error:
            busy = str(error)
        if busy:
            raise ProbeFailed(Failure("node", busy))

    def others(self, own: Collection[int]) -> str:
        """Return a note for a window in which other processes used a device, else ""."""
        try:
            busy = "; ".join(self._platform.busy({*own, os.getpid()}))
        except (InputError, MeterError):  # the meter reports it
            busy = ""
        return busy and f"at the end of the window, {busy}"

    def cause(self, failure: Failure) -> Failure:
        """Return the failure, as one of the node if a device was damaged meanwhile."""
        if not self._before or not failure.type.of_device:
            return failure
        found = new_faults(self._before, self._platform.faults())
        return Failure("node", f"{found}: {failure.message}") if found else failure
