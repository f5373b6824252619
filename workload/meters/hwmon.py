"""Energy of NVIDIA Grace superchip modules by the Linux hwmon power channels.

Each socket has up to four ACPI power meters, told apart by their label in `power1_oem_info`:
"Module Power Socket 0" holds everything of the superchip, "Grace Power Socket 0" the processor
with its memory, and "CPU" and "SysIO" are parts of that; so the module channels are summed and the
others are shown beside. They tell an average power in microwatts and no energy: a thread reads them
every 100 ms, as the GH200 study did, and integrates. (NVIDIA Grace Performance Tuning Guide, "Power
Telemetry"; Linux, Documentation/hwmon/acpi_power_meter.rst.)
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuner.workload.meters.base import PowerSample, Reading
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.integral import Integral, LostJoules
from tuner.workload.meters.ticker import Ticker
from tuner.workload.probe import MeterInfo

_LABEL = re.compile(r"(Module|Grace|CPU|SysIO) Power Socket (\d+)")
#: What each part's power is called on the timeline.
_PARTS = {"Grace": "grace_W", "CPU": "cpu_W", "SysIO": "sysio_W"}


@dataclass(frozen=True)
class _Channel:
    """Power channel of one socket."""

    part: str
    socket: int
    file: Path
    averaged_s: float

    def power_W(self) -> float:
        try:
            return int(self.file.read_text()) / 1e6
        except PermissionError as error:
            raise MeterError(
                f"the module's power is here, but only root may read {self.file}; an administrator "
                f"can grant it to a group: chgrp energy {self.file}; chmod g+r {self.file} (not to "
                "everyone: readings of power can reveal what other users compute)"
            ) from error
        except (OSError, ValueError) as error:
            raise MeterError(f"{self.file} cannot be read as a power: {error}") from error


def _channels(root: Path) -> list[_Channel]:
    found = []
    # The attributes lie in the device's folder, and in the class's own with newer kernels.
    for label in sorted(
        [*root.glob("hwmon*/power*_oem_info"), *root.glob("hwmon*/device/power*_oem_info")]
    ):
        try:
            match = _LABEL.fullmatch(label.read_text().strip())
        except OSError:
            continue
        if match is None:
            continue
        stem = label.name.removesuffix("_oem_info")
        power = label.with_name(f"{stem}_average")
        interval = label.with_name(f"{stem}_average_interval")
        try:
            averaged_s = int(interval.read_text()) / 1000
        except (OSError, ValueError):
            averaged_s = 0.0
        if power.exists():
            found.append(_Channel(match[1], int(match[2]), power, averaged_s))
    # A channel may be found in both places; it counts once.
    once = {(channel.part, channel.socket): channel for channel in found}
    return [once[key] for key in sorted(once)]


class HwmonMeter:
    """Meter of all superchip modules of this node; scope "module"; MeterError if there are none."""

    def __init__(
        self,
        root: str | Path = "/sys/class/hwmon",
        *,
        clock: Callable[[], float] = time.monotonic,
        sample_period_s: float = 0.1,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._broken = ""
        channels = _channels(Path(root))
        self._modules = [channel for channel in channels if channel.part == "Module"]
        self._parts = [channel for channel in channels if channel.part != "Module"]
        if not self._modules:
            raise MeterError(
                f'this machine has no superchip module: no "Module Power" channel under {root}'
            )
        sockets = ", ".join(str(channel.socket) for channel in self._modules)
        averaged_s = max(channel.averaged_s for channel in self._modules)
        self.info = MeterInfo(
            name="hwmon",
            scope="module",
            source=f"hwmon module power of socket {sockets}, "
            + (f"{averaged_s * 1000:.0f} ms averages " if averaged_s else "")
            + f"integrated every {sample_period_s * 1000:.0f} ms",
            host="the whole superchip: GPU, Grace processor, memory and links; nothing else of the "
            "node",
        )
        self.resolution_s = max(sample_period_s, averaged_s)
        self._energy = Integral(self._power_W, clock(), "the modules' power")
        self._ticker = Ticker(self._integrate, period_s=sample_period_s, name="joulefront-hwmon")

    def _power_W(self) -> float:
        return sum(channel.power_W() for channel in self._modules)

    def _integrate(self) -> None:
        with contextlib.suppress(MeterError):  # the next reader is told
            self.read()

    def read(self) -> Reading:
        """Return the joules of all modules since the meter was opened.

        MeterError if a channel was not read for 2 s: joules are lost, and the meter stays broken.
        """
        with self._lock:
            if self._broken:
                raise MeterError(self._broken)
            try:
                now_s = self._clock()
                return Reading(now_s, self._energy.energy_J(now_s))
            except LostJoules as error:
                self._broken = str(error)
                raise

    def boundary(self, *, opens: bool) -> Reading:
        """Return a reading, with a sample of its own at the edge."""
        return self.read()

    def sample(self) -> PowerSample:
        """Return the power of all modules; parts as "grace_W", "cpu_W", "sysio_W" if offered."""
        if self._broken:
            raise MeterError(self._broken)
        extra: dict[str, float] = {}
        for channel in self._parts:
            name = _PARTS[channel.part]
            extra[name] = extra.get(name, 0.0) + channel.power_W()
        return PowerSample(self._clock(), self._power_W(), extra)

    def close(self) -> None:
        """Close the meter; reading afterwards is an error. May be called twice."""
        self._ticker.stop()
        with self._lock:
            self._broken = "the module meter is closed"
