"""The interface of platforms, and what a machine lacks. By default a platform needs nothing.

Missing permissions and parts are told with the lines that an administrator runs. Only what can be
had here is missing: a virtual machine without energy counters lacks nothing that anyone could
permit, so its energy is estimated and it is ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import install_command
from tuner.workload.node.clocks.base import CoreGovernor, Governor
from tuner.workload.node.clocks.clock_backends import shipped_ways
from tuner.workload.node.host import CpuContention, why_few_cores, why_shm_is_small
from tuner.workload.node.meters import Meter, MeterError
from tuner.workload.node.meters.base import opener_of
from tuner.workload.node.meters.gpus import REMEDY, NoEnergy, TimeMeter, permits_time_alone
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.installed import TorchBuild


@dataclass(frozen=True)
class Program:
    """Program of the system that joulefront, or a training below it, starts.

    Attributes:
        brings: what it is for, a clause.
        line: what installs it on Debian and Ubuntu.
    """

    name: str
    brings: str
    line: str


#: The programs whose lack takes something away. Any other that a command line names is its own.
PROGRAMS = (
    Program(
        "g++",
        "with which DeepSpeed compiles its optimizer for offload, and torch.compile its kernels",
        "apt-get install g++",
    ),
    Program("ninja", "with which DeepSpeed compiles its operations", "pip install ninja"),
    Program("bash", "which starts a command line in quotes", "apt-get install bash"),
)
#: The packages without which nothing trains.
NEEDED = ("torch", "deepspeed", "transformers")
#: Those whose versions a study keeps besides.
USED = ("optuna", "ray", *NEEDED)


@dataclass(frozen=True)
class MissingItem:
    """One thing that is not permitted or not there.

    Attributes:
        lines: what an administrator runs; each line serves by itself unless it says "then".
    """

    subject: str
    lines: tuple[str, ...] = ()

    def text(self) -> list[str]:
        """Return the thing and its lines as text."""
        return [f"missing   {self.subject}", *(f"          {line}" for line in self.lines)]


def missing_clocks(environ: Mapping[str, str], *, slurm: bool = False) -> MissingItem:
    """Return the lines that permit clocks of GPUs to a user without root."""
    lines = [line for way in shipped_ways() for line in way.installation()]
    if slurm or environ.get("SLURM_JOB_ID"):
        lines.append("slurm:  one clock for a whole job: srun --gpu-freq=MHZ")
    return MissingItem("permission to set the clocks and power limits of the GPUs", tuple(lines))


def missing_of_cores(governor: CoreGovernor, energy_grant: str) -> Iterator[MissingItem]:
    """Return the obstacles to metering the cores' energy and setting their clocks."""
    for line, subject in (
        (energy_grant, "permission to read the energy of the processor"),
        (governor.clock_grant, "permission to set the clocks of the cores"),
        (governor.limit_grant, "permission to cap the power of the processor"),
    ):
        if line:
            yield MissingItem(subject, (line,))


def missing_parts(
    packages: Mapping[str, str | None],
    programs: Mapping[str, str | None],
    *,
    gpus: int,
    cores: float,
    shm_bytes: int,
    why_not_torch: str = "",
    import_errors: Mapping[str, str] | None = None,
) -> Iterator[MissingItem]:
    """Return the obstacles to training here, with the commands that remove them."""
    for name, why in (import_errors or {}).items():
        yield MissingItem(f"{name} {packages[name]} that can be imported: {why}")
    if lacking := [name for name in NEEDED if not packages.get(name)]:
        line = install_command("train")
        if not gpus and "torch" in lacking:
            line += " (before it torch's CPU build, or pip installs CUDA's, of 6 GB)"
        yield MissingItem(", ".join(lacking), (line,))
    if why_not_torch:
        yield MissingItem(f"a torch that can use the GPUs: {why_not_torch}")
    if why := why_few_cores(cores, gpus):
        yield MissingItem(f"cores: {why}")
    if gpus and (why := why_shm_is_small(shm_bytes, gpus)):
        yield MissingItem(f"shared memory: {why}")
    for program in PROGRAMS:
        if not programs.get(program.name):
            yield MissingItem(f"{program.name}, {program.brings}", (program.line,))


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
