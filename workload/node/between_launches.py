"""A node between two launches: its idle power, and GPU memory that ended ranks still hold."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.meters import Meter
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.gpus import ask, open_nvml, visible_gpus
from tuner.workload.node.preflight import busy_gpus

#: A device that has just worked is hot and at its highest clock: its power is that of an idle one
#: only after some seconds. An H100 then draws 20 to 60 % more than later.
COOL_S = 10.0
#: Ranks that unpin hundreds of gigabytes take longer than the kill that ended them.
RELEASE_LIMIT_S = 60.0


class IdlePower:
    """Idle power of a node, measured while its devices are cool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_until_s = -math.inf
        self.power_W: float | None = None

    def was_busy(self) -> None:
        """Note that ranks have worked until now."""
        self._busy_until_s = self._clock()

    def measure(
        self, meter: Meter, idle_s: float, wait: Callable[[float], object] = time.sleep
    ) -> float | None:
        """Return the idle power, watts: measured if the devices are cool, else the earlier one.

        Args:
            idle_s: how long it is measured, seconds; 0 measures nothing.

        Raises:
            MeterError: the meter cannot be read.
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
        return self.power_W


def _held(nvml: Any, environ: Mapping[str, str] | None) -> list[dict[int, int]]:
    """Return the bytes that each process holds, a dictionary for each visible GPU."""
    found = []
    for gpu in visible_gpus(nvml, environ=environ):
        running = ask(nvml, [], partial(nvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle))
        found.append({process.pid: process.usedGpuMemory or 0 for process in running})
    return found


def memory_of(
    pids: Collection[int], *, nvml: Any = None, environ: Mapping[str, str] | None = None
) -> int | None:
    """Return the memory that these processes hold on the GPU where they hold most, bytes.

    It includes what torch's allocator does not count: the CUDA context, buffers of NCCL and cuBLAS.

    Args:
        pids: the processes. In a container NVML may know them by other numbers.

    Returns:
        None if NVML knows none of them.
    """
    try:
        opened = open_nvml(nvml)
    except MeterError:
        return None
    try:
        sums = [sum(gpu.get(pid, 0) for pid in pids) for gpu in _held(opened, environ)]
        return max(sums, default=0) or None
    except (InputError, MeterError):
        return None
    finally:
        ask(opened, None, opened.nvmlShutdown)


def wait_for_release(
    *,
    nvml: Any = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float = RELEASE_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until nothing is left on the GPUs, so that the next ranks have room.

    Not only until the ranks are off NVML's lists: in a container those may have other numbers or be
    empty, and what the ranks still hold would pass for the memory of another process.

    Returns:
        The seconds that it took.
    """
    began_s = clock()
    with contextlib.suppress(InputError, MeterError):
        while busy_gpus(nvml, environ=environ) and clock() - began_s <= limit_s:
            sleep(0.1)
    return clock() - began_s
