"""Check of a node before a study measures on it, run on the node itself.

A cluster is shared: drivers differ, some nodes permit no clocks, other processes hold GPUs. `look`
gathers the facts of one node in about a second and changes nothing; `NodeFacts.refusals` then gives
the reasons against the node, one sentence each. Busy GPUs are checked again before every probe
(`busy_gpus`).
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.gpus import ask, open_nvml, visible_gpus
from tuner.workload.node.host import granted_cores, host_memory
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.ops import installed_version
from tuner.workload.node.readiness import ENOUGH_CORES, NEEDED, why_few_cores

#: Memory of an unused GPU: the driver's own share is under 1 % of the shipped kinds'. A
#: process in another container is seen by its memory only.
HELD_SHARE = 0.05
#: Host memory that must be free: ranks load the frameworks before they load the model.
FREE_EACH_BYTES = 2**30


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node.

    Attributes:
        cluster: the node as a cluster of one; None where that cannot be found out.
        trouble: why not.
        clock_note: why clocks cannot be set; empty where they can.
        compiler: the C++ compiler's path; empty without one: DeepSpeed's ops cannot be compiled.
        cores: those that were granted; 0 if unknown.
        busy: what else is on its GPUs, a phrase each.
        packages: version of torch, deepspeed and transformers; None where one is not installed.
        gpus: UUIDs of the visible GPUs, in the order in which CUDA numbers them.
    """

    host: str
    cluster: Cluster | None
    trouble: str = ""
    driver: str = ""
    clock_note: str = ""
    compiler: str = ""
    cores: float = 0.0
    memory_bytes: int = 0
    free_bytes: int = 0
    busy: tuple[str, ...] = ()
    packages: Mapping[str, str | None] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of device; empty if unknown."""
        return self.cluster.device.name if self.cluster is not None else ""

    def refusals(self, asked: Cluster | None = None) -> tuple[str, ...]:
        """Return the reasons against this node for a study, one sentence each; empty if it fits.

        Args:
            asked: the kind of node that the study wants; None asks for no kind.
        """
        here = f"node {self.host}"
        if self.cluster is None:
            return (f"{here} is not used: {self.trouble}",)
        found = []
        for name, version in self.packages.items():
            if version is None:
                found.append(f"{here} is not used: {name} is not installed there")
        on_gpus = self.cluster.device.type == "cuda"
        if on_gpus and asked is not None and asked.clock_control and self.clock_note:
            found.append(f"{here} is not used: its clocks may not be set ({self.clock_note})")
        devices = self._devices(asked)
        if why := self._few_cores(devices):
            found.append(f"{here} is not used: {why}")
        need_bytes = min(FREE_EACH_BYTES * devices, self.memory_bytes // 2)
        if self.free_bytes < need_bytes:
            found.append(
                f"{here} is not used: {self.free_bytes / 2**30:.1f} GiB of its memory are free, "
                f"and the ranks of a probe need {need_bytes / 2**30:.1f} GiB to start"
            )
        if self.busy:
            found.append(f"{here} is not used: {'; '.join(self.busy)}")
        return tuple(found)

    def warning(self, asked: Cluster | None = None) -> str:
        """Return one sentence if a rank of the study would have few cores, else ""."""
        few = self.cluster and self._few_cores(self._devices(asked), ENOUGH_CORES)
        return f"node {self.host}: {few}" if few else ""

    def _devices(self, asked: Cluster | None) -> int:
        """Return the number of devices on which ranks of the study may run."""
        assert self.cluster is not None
        here = self.cluster.devices_per_node
        return here if asked is None else min(here, asked.devices_per_node)

    def _few_cores(self, gpus: int, *each: float) -> str:
        # A device that is a core has one.
        on_gpus = self.cluster is not None and self.cluster.device.type == "cuda"
        return why_few_cores(self.cores, gpus, *each) if on_gpus and self.cores else ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON."""
        cluster = self.cluster
        return {
            "host": self.host,
            "kind": self.kind,
            "devices": cluster.devices_per_node if cluster else 0,
            "driver": self.driver,
            "clocks_may_be_set": bool(cluster and cluster.clock_control),
            "clock_note": self.clock_note,
            "compiler": self.compiler,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "free_bytes": self.free_bytes,
            "busy": list(self.busy),
            "packages": dict(self.packages),
        }


def busy_gpus(
    nvml: Any = None, *, environ: Mapping[str, str] | None = None, own: Collection[int] = ()
) -> tuple[str, ...]:
    """Describe other processes on this node's visible GPUs, a phrase each; empty without GPUs.

    Those that draw a display are no reason against a GPU, and an idle MPS server is none either.

    Args:
        own: process ids that are not others. Where NVML lists none of them on any GPU, it numbers
            processes as another container does, and no other can be told from them.

    Raises:
        InputError: the GPUs cannot be used as named.
        MeterError: NVML does not answer.
    """
    try:
        nvml = open_nvml(nvml)
    except MeterError:
        return ()
    try:
        found = []
        listed: set[int] = set()
        for gpu in visible_gpus(nvml, environ=environ):
            compute = ask(nvml, [], partial(_processes, nvml, gpu.handle, "Compute"))
            graphics = ask(nvml, [], partial(_processes, nvml, gpu.handle, "Graphics"))
            displays = {process.pid for process in graphics}
            pids = {process.pid for process in compute}
            listed |= pids
            memory = ask(nvml, None, partial(_memory, nvml, gpu.handle))
            # A notebook's kernel that looked at the GPU and now runs tuner does nothing else.
            idle = {os.getpid()} if memory and memory.used <= HELD_SHARE * memory.total else set()
            theirs = pids - displays - set(own) - idle
            others = sorted(pid for pid in theirs if not _serves(nvml, pid))
            if others:
                named = ", ".join(str(pid) for pid in others)
                what = "processes" if len(others) > 1 else "process"
                found.append(f"GPU {gpu.index} is used by {what} {named}")
                continue
            if pids or memory is None or not memory.total:
                continue
            # A display's memory is explained by its processes (Xorg, gnome-shell, a browser).
            held = memory.used - sum(process.usedGpuMemory or 0 for process in graphics)
            if held > HELD_SHARE * memory.total:
                found.append(
                    f"{held / 2**30:.1f} GiB of GPU {gpu.index}'s memory are held by a process "
                    "that cannot be seen from here"
                )
        return tuple(found) if not own or listed & set(own) else ()
    finally:
        ask(nvml, None, nvml.nvmlShutdown)


def _processes(nvml: Any, handle: Any, kind: str) -> Any:
    return getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)


def _serves(nvml: Any, pid: int) -> bool:
    """Return True if a process only passes on the work of others and has none itself."""
    name = ask(nvml, "", lambda: nvml.nvmlSystemGetProcessName(pid))
    return "nvidia-cuda-mps" in (name.decode() if isinstance(name, bytes) else name)


def _memory(nvml: Any, handle: Any) -> Any:
    """Return the memory in use without the driver's reserve, where NVML tells it apart."""
    split = ask(
        nvml, None, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    )
    return split or nvml.nvmlDeviceGetMemoryInfo(handle)


def look(
    *,
    nvml: Any = None,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
    which: Callable[[str], str | None] = shutil.which,
) -> NodeFacts:
    """Collect this node's facts. Never raises: an error becomes their `trouble`."""
    environ = os.environ if environ is None else environ
    host = platform.node()
    packages = {name: installed_version(name) for name in NEEDED}
    compiler = which(environ.get("CXX", "c++")) or which("g++") or ""
    try:
        memory_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
        cluster = detect_cluster(nvml=nvml, proc=proc, cgroup=cgroup, environ=environ)
        driver, clock_note = "", ""
        busy: tuple[str, ...] = ()
        gpus: tuple[str, ...] = ()
        if cluster.device.type == "cuda":
            driver, gpus, clock_note = _gpu_facts(nvml, environ, cluster)
            busy = busy_gpus(nvml, environ=environ)
    except (InputError, MeterError) as error:
        return NodeFacts(host, None, str(error), compiler=compiler, packages=packages)
    return NodeFacts(
        host,
        cluster,
        driver=driver,
        clock_note=clock_note,
        compiler=compiler,
        cores=granted_cores(proc=proc, cgroup=cgroup, affinity=affinity),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        busy=busy,
        packages=packages,
        gpus=gpus,
    )


def _gpu_facts(
    nvml: Any, environ: Mapping[str, str], cluster: Cluster
) -> tuple[str, tuple[str, ...], str]:
    """Return the driver's version, the GPUs' UUIDs and the reason if clocks cannot be set."""
    from tuner.workload.clocks.governor import NvmlGovernor

    opened = open_nvml(nvml)
    try:
        driver = str(ask(opened, "", opened.nvmlSystemGetDriverVersion))
        gpus = tuple(gpu.uuid for gpu in visible_gpus(opened, environ=environ))
    finally:
        ask(opened, None, opened.nvmlShutdown)
    if cluster.clock_control:
        return driver, gpus, ""
    governor = NvmlGovernor(nvml=nvml, environ=environ, guard_nvml="")
    governor.close()
    return driver, gpus, governor.why_not
