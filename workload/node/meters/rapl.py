"""Energy of processor packages and their memory by RAPL, and an estimate where it cannot be read.

Zones named "package-N" and, below them, "dram" are added up; "core" and "uncore" are parts of their
package, "psys" holds it, and the "-mmio" twins count it a second time, so all of those are left
out. Each counter wraps at `max_energy_range_uj`, in minutes on a busy server, so a thread reads
them often enough to see every wrap. (Linux, Documentation/power/powercap/powercap.rst.)

The estimate is utilisation of the cores times a stated envelope. Each core is charged `idle_W` all
the time and `max_W - idle_W` more while busy, by /proc/stat, in ticks of 10 ms, which counts every
process on those cores. This is a model of the machine, not a measurement: neither clocks nor the
kind of instruction enter it. `info.estimated` is set.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tuner.search_spaces.errors import InvalidValue
from tuner.workload.node.host import busy_ticks
from tuner.workload.node.meters.base import CounterMeter, MeterError, Reading, Ticker
from tuner.workload.records.probe import MeterInfo

#: The smallest range in use, 65.5 kJ, lasts 20 s up to 3.2 kW a package.
KEEP_S = 20.0
#: RAPL updates about every 1 ms; 10 ms keep the error of one update within a tenth.
RAPL_UPDATE_S, MIN_SLOPE_S = 0.001, 0.01


class _Zone:
    """Counter in microjoules, corrected for wraps."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._file = folder / "energy_uj"
        self._range_uJ = self._int(folder / "max_energy_range_uj")
        self._last_uJ = self._int(self._file)
        self._total_uJ = 0

    def _int(self, file: Path) -> int:
        try:
            return int(file.read_text())
        except PermissionError as error:
            grant = f"chgrp energy {file}; chmod g+r {file}"
            raise MeterError(
                f"RAPL is here, but only root may read {file}; an administrator can grant it to a "
                f"group: {grant} (not to everyone: readings of energy can reveal other users' "
                "keys, PLATYPUS, CVE-2020-8694)",
                grant=grant,
            ) from error
        except (OSError, ValueError) as error:
            raise MeterError(f"RAPL zone {self.name} cannot be read: {error}") from error

    def energy_uJ(self) -> int:
        now_uJ = self._int(self._file)
        step_uJ = now_uJ - self._last_uJ
        if step_uJ < 0:
            step_uJ += self._range_uJ
        if step_uJ < 0:
            raise MeterError(
                f"RAPL zone {self.name} went from {self._last_uJ} to {now_uJ} uJ, more than its "
                f"range of {self._range_uJ} uJ"
            )
        self._last_uJ = now_uJ
        self._total_uJ += step_uJ
        return self._total_uJ


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""


def _zones(root: Path) -> list[_Zone]:
    zones = []
    for package in sorted(root.glob("intel-rapl:*")):  # AMD's packages bear this name too
        if not re.fullmatch(r"intel-rapl:\d+", package.name):
            continue
        if not (name := _name(package)).startswith("package"):
            continue
        zones.append(_Zone(package, name))
        for part in sorted(root.glob(f"{package.name}:*")) or sorted(
            package.glob(f"{package.name}:*")
        ):
            if _name(part) == "dram":
                zones.append(_Zone(part, f"{name}/dram"))
    return zones


class RaplMeter(CounterMeter):
    """Meter of all packages and their DRAM; scope "node" (without fans, disks, GPUs).

    MeterError if there are no such zones, or they may not be read, with what to run.
    """

    resolution_s = RAPL_UPDATE_S

    def __init__(
        self,
        root: str | Path = "/sys/class/powercap",
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._zones = _zones(Path(root))
        if not self._zones:
            raise MeterError(f"this machine has no RAPL: no package zone under {root}")
        super().__init__("RAPL", min_s=MIN_SLOPE_S, clock=clock, sleep=sleep)
        names = ", ".join(zone.name for zone in self._zones)
        self.info = MeterInfo(
            name="rapl",
            scope="node",
            source=f"RAPL counters of {names}",
            host="processor packages and their memory, whoever used them; GPUs, disks, network, "
            "fans and power supplies are not charged",
        )
        self._ticker = Ticker(self._keep, period_s=KEEP_S, name="joulefront-rapl")

    def _keep(self) -> None:
        with contextlib.suppress(MeterError):  # the next reader is told
            self.read()

    def _count(self) -> Reading:
        before_s = self._clock()
        energy_uJ = sum(zone.energy_uJ() for zone in self._zones)
        return Reading((before_s + self._clock()) / 2, energy_uJ / 1e6)

    def close(self) -> None:
        super().close()
        self._ticker.stop()


#: Five ticks: closer samples would show the ticks and not the load. Well under the timeline's
#: period, or a sample that comes a little early would have to wait and lose the next.
ESTIMATE_SLOPE_S = 0.05


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
        super().__init__("estimated", min_s=ESTIMATE_SLOPE_S, clock=clock, sleep=sleep)

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
