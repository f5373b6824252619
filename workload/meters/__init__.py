"""Meters: energy sources of a node, each with its scope and its kind of reading.

NVML on GPUs, RAPL on a machine without, and an estimate, always labelled, where neither can be
read. On superchips the hwmon module meter can be read beside NVML's, in a scope of its own.
`open_meter` picks one, `open_beside` finds the others; callers use the protocol only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster, Device, load_device
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.meters.base import Meter, PowerSample, Reading
from tuner.workload.meters.errors import MeterError

__all__ = [
    "METERS",
    "Meter",
    "MeterError",
    "PowerSample",
    "Reading",
    "open_beside",
    "open_meter",
]

#: The meters by name, in the order of preference.
METERS = ("nvml", "hwmon", "rapl", "estimated")


def open_named(
    name: str,
    *,
    cluster: Cluster | None = None,
    powercap: str | Path = "/sys/class/powercap",
    hwmon: str | Path = "/sys/class/hwmon",
    envelope: Device | None = None,
) -> Meter:
    """Open one of `METERS`, or raise MeterError; the estimate's envelope is a core's."""
    if name == "nvml":
        from tuner.workload.meters.nvml import NvmlMeter

        return NvmlMeter()
    if name == "hwmon":
        from tuner.workload.meters.hwmon import HwmonMeter

        return HwmonMeter(hwmon)
    if name == "rapl":
        from tuner.workload.meters.rapl import RaplMeter

        return RaplMeter(powercap)
    from tuner.workload.meters.estimated import EstimatedMeter
    from tuner.workload.platforms import platform_of

    if envelope is None and cluster is not None and name in platform_of(cluster).meters:
        envelope = cluster.device
    core = envelope or load_device("cpu-core")
    host_W = cluster.host_W if cluster is not None else 0.0
    return EstimatedMeter(idle_W=core.idle_W, max_W=core.max_W, host_W=host_W)


def open_meter(cluster: Cluster | None = None, *, prefer: str | None = None, **more: Any) -> Meter:
    """Open the best meter for this node of `cluster`, or the first that opens without one.

    GPUs are metered by NVML, or on request by their superchip modules' meter, and by nothing else,
    since a processor's joules would pass for theirs. Cores are metered by RAPL where it may be
    read, else estimated. InputError if the meter asked for, or the only right one, does not open.
    """
    from tuner.workload.platforms import platform_of

    if prefer is not None and prefer not in METERS:
        raise UnknownName("meter", prefer, METERS)
    of = f" of cluster {cluster.name!r}" if cluster is not None else ""
    platform = platform_of(cluster) if cluster is not None else None
    allowed = platform.on_request if platform else None
    if platform and allowed is not None and prefer not in (None, *platform.meters, *allowed):
        raise InputError(
            f"{prefer} would leave out the GPUs{of}; only nvml meters them, or hwmon with their "
            "superchip modules"
        )
    names = platform.meters if platform else METERS
    reasons = []
    for name in names if prefer is None else (prefer,):
        try:
            return open_named(name, cluster=cluster, **more)
        except MeterError as error:
            reasons.append(str(error))
    raise InputError(f"the energy{of} cannot be metered: {'; '.join(reasons)}")


def open_beside(meter: Meter, *, hwmon: str | Path = "/sys/class/hwmon") -> tuple[Meter, ...]:
    """Open the meters of other scopes beside `meter`; they are never added to it."""
    if meter.info.name != "nvml" or meter.info.scope == "module":
        return ()
    from tuner.workload.meters.hwmon import HwmonMeter

    try:
        return (HwmonMeter(hwmon),)
    except MeterError:
        return ()
