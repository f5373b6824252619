"""Cores of the processor as devices, on a machine without GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from tuner.search_spaces.cluster import Cluster, Device, load_device
from tuner.search_spaces.plugins import not_installed
from tuner.workload.node.clocks.base import SOCKET, CoreGovernor, FixedGovernor, Governor
from tuner.workload.node.host import CpuContention
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import opener_of
from tuner.workload.node.meters.rapl import EstimatedMeter, RaplMeter
from tuner.workload.node.platforms.base import ClockFacts, Host, Platform, missing_of_cores
from tuner.workload.records.probe import MeterInfo

#: Between two ranks on one host through shared memory: a guess, as in the shipped cluster "cpu-2".
LOOPBACK_BPS = 5e9


class Cores(Platform):
    """The cores that this process may use."""

    def _rapl(self) -> Meter:
        return RaplMeter(self.sys / "class" / "powercap")

    def _no_energy(self, meter: MeterInfo | None = None) -> MeterError | None:
        # The reason why energy is estimated; None if the meter, or the one to be opened, counts it.
        if meter is not None and not meter.estimated:
            return None
        own = opener_of(self.environ)
        try:
            with closing(self._rapl() if own is None else own()) as opened:
                if own is not None and opened.info.estimated:
                    return MeterError(f"meter {opened.info.name} estimates it")
        except MeterError as error:
            return error
        return None

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        core, host_W = cluster.device, cluster.host_W
        return {
            "rapl": self._rapl,
            "estimated": lambda: EstimatedMeter(
                idle_W=core.idle_W, max_W=core.max_W, host_W=host_W
            ),
        }

    def open_governor(self, cluster: Cluster, meter: MeterInfo | None = None) -> Governor:
        """Return the governor; a fixed one where energy is estimated, which knows no clock."""
        if (made := SOCKET.part("cores")) is None:
            return FixedGovernor(str(not_installed("setting clocks of cores")))
        governor: CoreGovernor = made(self.sys)
        if governor.can_set and (error := self._no_energy(meter)):
            governor.close()
            return FixedGovernor(
                f"clocks are set only where energy is metered, and here it is estimated: {error}"
            )
        return governor

    def clocks(self) -> ClockFacts:
        if (made := SOCKET.part("cores")) is None:
            return ClockFacts(False, str(not_installed("setting them")))
        no_energy = self._no_energy()
        governor: CoreGovernor = made(self.sys, guarded=False)
        with closing(governor) as cores:
            missing = tuple(missing_of_cores(cores, no_energy.grant if no_energy else ""))
            if cores.can_set and no_energy:
                note = "set only where energy is metered"
                return ClockFacts(False, note, missing=missing)
            note = "not permitted" if missing else cores.why_not
            return ClockFacts(cores.can_set, note, missing=missing)

    def contention(self, pids: Sequence[int]) -> CpuContention | None:
        return CpuContention(pids, os.sched_getaffinity(0))

    def rank_cores(self, rank: int, cores: Sequence[int], threads: int) -> tuple[int, ...]:
        first = rank * threads % len(cores)
        return tuple(cores[first : first + threads])

    def rank_environment(
        self, env: Mapping[str, str], ranks: int, own: int, interface: str
    ) -> Mapping[str, str]:
        # A node may have GPUs beside the cores in use.
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(own, 1))}

    def cluster(self, host: Host) -> Cluster:
        device = load_device(host.core)
        device = replace(
            device,
            memory_bytes=host.memory_bytes // host.cores,
            sources=("memory: this machine's, shared by its usable cores", *device.sources),
        )
        alone = Cluster("this-machine", device, host.cores)
        with closing(self.open_governor(alone)) as governor:
            device = _controlled(device, governor)
        return Cluster(
            name="this-machine",
            device=device,
            devices_per_node=host.cores,
            clock_control=governor.can_set,
            link_Bps=LOOPBACK_BPS,
            host_link_Bps=device.memory_bandwidth_Bps,
            host_memory_bytes=host.memory_bytes,
            sources=("detected: affinity, control group, /proc/meminfo; link_Bps: a guess",),
        )


def _controlled(device: Device, governor: Governor) -> Device:
    """Return the core with the clocks and power limits that may be set here."""
    if not isinstance(governor, CoreGovernor) or not governor.can_set:
        return device
    device = replace(
        device,
        clocks_MHz=governor.supported_clocks_MHz,
        default_clock_MHz=governor.default_clock_MHz or device.default_clock_MHz,
        sources=("clocks and power limits: cpufreq and RAPL of this machine", *device.sources),
    )
    low_W, high_W = governor.limit_range_W
    cores = governor.cores_per_package
    if device.idle_W * cores < high_W:
        return replace(
            device,
            max_W=high_W / cores,
            min_limit_W=max(low_W, device.idle_W * cores),
            devices_per_limit=cores,
        )
    return device
