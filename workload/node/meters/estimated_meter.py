"""Estimate for machines without a meter: utilisation of the cores times a stated envelope.

Each core is charged `idle_W` all the time and `max_W - idle_W` more while busy, by /proc/stat, in
ticks of 10 ms, which counts every process on those cores. This is a model of the machine, not a
measurement: neither clocks nor the kind of instruction enter it. `info.estimated` is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tuner.search_spaces.errors import InvalidValue
from tuner.workload.node.host import busy_ticks
from tuner.workload.node.meters.base import CounterMeter, MeterError, Reading
from tuner.workload.records.probe import MeterInfo

#: Five ticks: closer samples would show the ticks and not the load. Well under the timeline's
#: period, or a sample that comes a little early would have to wait and lose the next.
MIN_SLOPE_S = 0.05


class EstimatedMeter(CounterMeter):
    """Meter of utilisation times a stated envelope of watts a core; scope "node".

    The rest of the node is charged `host_W` all the time. `cpus` are the cores, by default those
    this process may use, `tick_s` the unit of `stat`. InvalidValue if the envelope is no range,
    MeterError if the file has none of these cores.
    """

    def __init__(
        self,
        *,
        idle_W: float,
        max_W: float,
        cpus: Iterable[int] | None = None,
        host_W: float = 0.0,
        stat: str | Path = "/proc/stat",
        tick_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= idle_W <= max_W:
            raise InvalidValue("idle_W of the envelope", idle_W, f"from 0 to max_W ({max_W:g})")
        if host_W < 0:
            raise InvalidValue("host_W of the envelope", host_W, "at least 0")
        self._cpus = frozenset(os.sched_getaffinity(0) if cpus is None else cpus)
        self._stat = Path(stat)
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK") if tick_s is None else tick_s
        self.idle_W = host_W + len(self._cpus) * idle_W
        self.busy_W = max_W - idle_W
        self._busy_ticks = 0
        self._last_ticks = self._ticks()
        self._start_s = clock()
        host, plural = f"{host_W:g} W + " if host_W else "", "s" if len(self._cpus) != 1 else ""
        each = f"({idle_W:g} W idle + {max_W - idle_W:g} W x utilisation)"
        self.info = MeterInfo(
            name="estimated",
            scope="node",
            source=f"{host}{len(self._cpus)} core{plural} x {each}",
            estimated=True,
            host="all of these cores' assumed power, whoever used them"
            + (f", and {host_W:g} W for the rest of the node" if host_W else "")
            + "; nothing else of the node",
        )
        self.resolution_s = self._tick_s
        super().__init__("estimated", min_s=MIN_SLOPE_S, clock=clock, sleep=sleep)

    def _ticks(self) -> dict[int, int]:
        # Since boot, by core; one that is switched off has no line.
        try:
            ticks = busy_ticks(self._cpus, self._stat)
        except (OSError, ValueError) as error:
            raise MeterError(f"{self._stat} cannot be read as processor times: {error}") from error
        if not ticks:
            raise MeterError(f"{self._stat} holds none of the cores {sorted(self._cpus)}")
        return ticks

    def _count(self) -> Reading:
        ticks, now_s = self._ticks(), self._clock()
        for cpu, busy in ticks.items():
            # A core that comes back online may count from a lower value.
            self._busy_ticks += max(0, busy - self._last_ticks.get(cpu, busy))
        self._last_ticks.update(ticks)
        energy_J = self.idle_W * (now_s - self._start_s)
        return Reading(now_s, energy_J + self.busy_W * self._busy_ticks * self._tick_s)
