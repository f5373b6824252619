"""Energy of NVIDIA's Grace superchips, by the power channels of their modules beside NVML.

Each socket has up to four ACPI power meters under hwmon, told apart by `power1_oem_info`: "Module
Power Socket 0" holds everything of the superchip, "Grace Power Socket 0" the processor with its
memory; "CPU" and "SysIO" are parts of that. So the modules are summed, and the others and the GPUs
stand beside them in the samples: nothing is added twice. A module of GH200 holds one GPU, one of
GB200 and GB300 two (a tray of four has two sockets, whose modules' power includes the GPUs';
SemiAnalysisAI/InferenceX, docs on NVL72). They tell an average power and no energy, which is
integrated (NVIDIA Grace Performance Tuning Guide, "Power Telemetry"; Linux,
Documentation/hwmon/acpi_power_meter.rst).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.workload.node.meters.base import Meter, MeterError, Reading, Ticker
from tuner.workload.node.meters.nvml import (
    TWO_ON_A_MODULE,
    Edge,
    Integral,
    LostJoules,
    NvmlMeter,
    WatchedMeter,
)
from tuner.workload.records.probe import MeterInfo, PowerSample

_LABEL = re.compile(r"(Module|Grace|CPU|SysIO) Power Socket (\d+)")
#: Names of the parts' powers in a sample.
PARTS = {"Grace": "grace_W", "CPU": "cpu_W", "SysIO": "sysio_W"}
#: A module holds its GPU: it may tell less energy by the sensors' errors alone.
LEAST_SHARE = 0.95
#: Shortest span over which module and GPU are compared, seconds.
COMPARED_S = 2.0


@dataclass(frozen=True)
class Channel:
    """Power channel of one socket."""

    part: str
    socket: int
    file: Path

    def power_W(self) -> float:
        """Return the average power of the last interval; MeterError if it cannot be read."""
        try:
            return int(self.file.read_text()) / 1e6
        except PermissionError as error:
            raise MeterError(
                f"only root may read {self.file}; an administrator can grant it to a group (not to "
                "all users: readings of power can reveal what others compute)",
                grant=f"chgrp energy {self.file}; chmod g+r {self.file}",
            ) from error
        except (OSError, ValueError) as error:
            raise MeterError(f"{self.file} cannot be read as a power: {error}") from error


def channels(root: Path) -> list[Channel]:
    """Return the power channels of superchips, by part and socket."""
    found: dict[tuple[str, int], Channel] = {}
    # The attributes lie in the device's folder, and with newer kernels in the class's own.
    for pattern in ("hwmon*/power*_oem_info", "hwmon*/device/power*_oem_info"):
        for label in sorted(root.glob(pattern)):
            with contextlib.suppress(OSError):
                match = _LABEL.fullmatch(label.read_text().strip())
                file = label.with_name(f"{label.name.removesuffix('_oem_info')}_average")
                if match is not None and file.exists():
                    part, socket = match[1], int(match[2])
                    found.setdefault((part, socket), Channel(part, socket, file))
    return [found[key] for key in sorted(found)]


class SuperchipMeter(WatchedMeter):
    """Energy of all superchip modules of this node, scope "module".

    Args:
        gpus: meter of the GPUs, which stand beside the modules.
        count: number of visible GPUs; modules are charged only if all of their GPUs are visible.
        each: number of GPUs on a module.

    MeterError if there are no modules, or if GPUs of them are not visible.
    """

    def __init__(
        self,
        gpus: Meter,
        count: int,
        *,
        each: int = 1,
        root: str | Path = "/sys/class/hwmon",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        sample_period_s: float = 0.05,
    ) -> None:
        every = channels(Path(root))
        self._modules = [channel for channel in every if channel.part == "Module"]
        self._parts = [channel for channel in every if channel.part != "Module"]
        if not self._modules:
            raise MeterError(f'no superchip: there is no "Module Power" channel under {root}')
        modules = len(self._modules)
        if each * modules != count:
            raise MeterError(
                f"{modules} superchip modules and {count} visible GPUs: which of them belong "
                "together is not known"
            )
        super().__init__(clock, sleep)
        self._gpus = gpus
        self._energy = Integral(self._power_W, clock())
        self._compared = (gpus.read(), 0.0)  # energies of GPUs and of modules at the last edge
        self.resolution_s = max(0.1, gpus.resolution_s)
        self.info = MeterInfo(
            name="superchip",
            scope="module",
            source=f"hwmon module power of {modules} superchip{'s' * (modules > 1)}, integrated "
            f"every {1000 * sample_period_s:.0f} ms; {gpus.info.source} beside it",
            host="the whole superchips: GPU, Grace processor, memory and links; nothing else of "
            "the node",
            twin=gpus.info.twin,
            tells_clocks=gpus.info.tells_clocks,
        )
        self._ticker = Ticker(
            self._integrate, period_s=sample_period_s, name="joulefront-superchip"
        )

    def _power_W(self) -> float:
        return sum(channel.power_W() for channel in self._modules)

    def read(self) -> Reading:
        """Return the joules of all modules since the meter was opened."""
        with self._reading():
            now_s = self._clock()
            return Reading(now_s, self._energy.energy_J(now_s))

    def boundary(self, *, opens: bool) -> Reading:
        """Return a reading at a window's edge, as `Meter.boundary` has it.

        Raises:
            MeterError: the modules tell less than their GPUs, so a sensor stands still.
        """
        with self._reading():
            called_s = self._clock()
            edge = Edge(self._energy, called_s, counts=False)
            found = self._at_edge([edge], called_s, opens=opens)
            self._compare()
            return found

    def _compare(self) -> None:
        # Since the last comparison, so that a sensor that stops late in a study is noticed.
        (before, before_J), gpus = self._compared, self._gpus.read()
        if gpus.time_s - before.time_s < COMPARED_S:
            return
        modules_J = self._energy.energy_J(self._clock())
        self._compared = (gpus, modules_J)
        if modules_J - before_J < LEAST_SHARE * (gpus.energy_J - before.energy_J):
            raise LostJoules(
                "the superchips' modules tell less energy than their GPUs: a sensor under hwmon "
                "stands still"
            )

    def sample(self) -> PowerSample:
        """Return the modules' power, with "gpu_W", "grace_W", "cpu_W" and "sysio_W" beside it."""
        self._check()
        gpus = self._gpus.sample()
        beside = {"gpu_W": gpus.power_W}
        for channel in self._parts:
            name = PARTS[channel.part]
            beside[name] = beside.get(name, 0.0) + channel.power_W()
        return replace(gpus, power_W=self._power_W(), extra={**gpus.extra, **beside})

    def close(self) -> None:
        """Close both meters. May be called twice."""
        self._ticker.stop()
        with self._lock:
            self._broken = "the superchip meter is closed"
        self._gpus.close()


def opener(open_gpus: Callable[[], NvmlMeter], root: Path) -> Callable[[], Meter] | None:
    """Return how to open the modules' meter with that of the GPUs beside it; None without modules.

    Args:
        root: folder of hwmon.
    """
    if not channels(root):
        return None

    def opened() -> Meter:
        gpus = open_gpus()
        try:
            each = 2 if any(TWO_ON_A_MODULE.search(gpu.name) for gpu in gpus.gpus) else 1
            return SuperchipMeter(gpus, len(gpus.gpus), each=each, root=root)
        except BaseException:
            gpus.close()
            raise

    return opened
