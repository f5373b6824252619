"""The interface of platforms. By default a platform needs nothing and reports nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import Governor
from tuner.workload.node.host import CpuContention
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import opener_of
from tuner.workload.node.meters.time_meter import REMEDY, NoEnergy, TimeMeter, permits_time_alone
from tuner.workload.node.readiness import MissingItem
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.installed import TorchBuild

#: Numbers of faults by UUID of the device and name, as a sentence calls them.
Counters = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class GpuFacts:
    """One visible GPU; `memory_bytes` is None if it has none of its own."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    persistence_mode: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """The devices of a platform on this node; broken if they exist and cannot be queried."""

    devices: tuple[GpuFacts, ...] = ()
    driver: str = ""
    why_none: str = ""
    broken: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """Share of a node's host that this process may use; `core` is a device file's name or path."""

    memory_bytes: int
    cores: int
    core: str = "cpu-core"
    dev: str | Path = "/dev"


@dataclass(frozen=True)
class ClockFacts:
    """Permission to set clocks: `why_not` is empty where they can be set."""

    can_set: bool
    note: str
    why_not: str = ""
    missing: tuple[MissingItem, ...] = ()


class Platform:
    """Interface of one kind of device on this node.

    `accelerator` is DeepSpeed's name of the devices on which ranks compute.
    """

    #: Libraries of the driver that imports may open and ranks then open anew: file, function that
    #: closes it, Python module, and its function that opens it.
    libraries: ClassVar[tuple[tuple[str, str, str, str], ...]] = ()
    accelerator: str = "cpu"
    #: True if `doctor` lists the platform although nothing of it is on the node.
    always_listed = True

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, sys: str | Path = "/sys"
    ) -> None:
        self.environ, self.sys = os.environ if environ is None else environ, Path(sys)

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        """Return how to open each meter that charges a job on these devices, by preference."""
        raise NotImplementedError

    def open_meter(self, cluster: Cluster) -> Meter:
        """Open the user's own meter, else the best for this node of `cluster`.

        Devices without energy get a `TimeMeter` in a study that asks for time alone.

        Raises:
            InputError: the user's meter does not open, or none of the platform's.
        """
        if (own := opener_of(self.environ)) is not None:
            try:
                return own()
            except MeterError as error:
                raise InputError(str(error)) from error
        reasons, silent = [], False
        for opened in self.meters(cluster).values():
            try:
                return opened()
            except MeterError as error:
                reasons.append(str(error))
                silent = silent or isinstance(error, NoEnergy)
        why = "; ".join(reasons)
        if silent and permits_time_alone(self.environ):
            return TimeMeter(why)
        remedy = f"; {REMEDY}" if silent else ""
        raise InputError(f"the energy of cluster {cluster.name!r} cannot be metered: {why}{remedy}")

    def open_governor(self, cluster: Cluster, meter: MeterInfo | None = None) -> Governor:
        """Return the governor of this node, or a fixed one with its reason.

        Args:
            meter: the meter in use; if None, the one that would be opened.
        """
        raise NotImplementedError

    def why_fixed(self, cluster: Cluster) -> str:
        """Return why live knobs are fixed, with the command for an administrator; "" if not."""
        with closing(self.open_governor(replace(cluster, clock_control=True))) as governor:
            return governor.why_not

    def clocks(self) -> ClockFacts:
        """Find out whether clocks may be set, without changing anything."""
        raise NotImplementedError

    def busy(self, own: Collection[int] = ()) -> tuple[str, ...]:
        """Describe other processes on the devices, a phrase each; MeterError if unknown."""
        return ()

    def contention(self, pids: Sequence[int]) -> CpuContention | None:
        """Watch other processes on the cores from now on, if cores are the devices."""
        return None

    def memory_held(self, pids: Collection[int]) -> int | None:
        """Return the memory in use on the fullest device, bytes; None if unknown."""
        return None

    def wait_for_release(self) -> float:
        """Wait until ended ranks have left the devices; return the seconds that it took."""
        return 0.0

    def faults(self) -> Counters:
        """Return counters of damage; empty if the devices have none."""
        return {}

    def memory_nodes(self) -> list[int] | None:
        """Return the memory node of each device, in the order of ranks; None if they have none."""
        return None

    def capabilities(self) -> str:
        """Return the targets of DeepSpeed's ops, in the form of TORCH_CUDA_ARCH_LIST."""
        return ""

    def why_not_torch(self, build: TorchBuild) -> str:
        """Return one sentence if this torch cannot use the devices, else ""."""
        return ""

    def why_few_cores(self, cores: float, ranks: int, *each: float) -> str:
        """Return one sentence if ranks have fewer than `each` cores, else ""."""
        return ""

    def warnings(self, ranks: int) -> Sequence[str]:
        """Return warnings on causes that may slow down this number of ranks on this node."""
        return ()

    def rank_cores(self, rank: int, cores: Sequence[int], threads: int) -> tuple[int, ...]:
        """Return those of the granted cores to which an unbound rank keeps; empty for all.

        Args:
            rank: its number on this node.
            threads: that it computes with where a core is a device.
        """
        return ()

    def rank_environment(
        self, env: Mapping[str, str], ranks: int, own: int, interface: str
    ) -> Mapping[str, str]:
        """Return the variables by which a rank finds its device; it is bound to `own` cores."""
        return {}

    def facts(self) -> DeviceFacts:
        """Look for devices, without changing anything."""
        return DeviceFacts()

    def cluster(self, host: Host) -> Cluster | None:
        """Describe this node as a cluster, or None; InputError if its devices differ."""
        raise NotImplementedError
