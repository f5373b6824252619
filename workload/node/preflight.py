"""Check of a node before a study measures on it, run on the node itself.

`look` gathers the facts of one node in about a second and changes nothing; `NodeFacts.refusals`
gives the reasons against it. Busy devices are checked again before every probe (`Platform.busy`).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.meters.errors import MeterError
from tuner.workload.node.host import ENOUGH_CORES, granted_cores, host_memory
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.ops import installed_version
from tuner.workload.node.readiness import NEEDED
from tuner.workload.platforms import PLATFORMS, platform_of

#: Host memory that must be free: ranks load the frameworks before they load the model.
FREE_EACH_BYTES = 2**30


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node.

    `clock_note` says why clocks cannot be set, `compiler` is the C++ compiler's path, each "" if
    there is none; `gpus` are the UUIDs of the visible GPUs, in CUDA's order.
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
        """Return the reasons against this node for a study, one sentence each; empty if it fits."""
        here = f"node {self.host}"
        if self.cluster is None:
            return (f"{here} is not used: {self.trouble}",)
        found = []
        for name, version in self.packages.items():
            if version is None:
                found.append(f"{here} is not used: {name} is not installed there")
        if asked is not None and asked.clock_control and self.clock_note:
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

    def _few_cores(self, ranks: int, *each: float) -> str:
        assert self.cluster is not None
        platform = platform_of(self.cluster)
        return platform.why_few_cores(self.cores, ranks, *each) if self.cores else ""

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


def look(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
    which: Callable[[str], str | None] = shutil.which,
) -> NodeFacts:
    """Collect this node's facts. Never raises: an error becomes their `trouble`."""
    environ = os.environ if environ is None else environ
    host = socket.gethostname()
    packages = {name: installed_version(name) for name in NEEDED}
    compiler = which(environ.get("CXX", "c++")) or which("g++") or ""
    try:
        memory_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
        cluster = detect_cluster(proc=proc, cgroup=cgroup, environ=environ)
        platform = PLATFORMS[cluster.device.type](environ)
        found, busy = platform.facts(), platform.busy()
        clock_note = "" if cluster.clock_control else platform.clocks().why_not
    except (InputError, MeterError) as error:
        return NodeFacts(host, None, str(error), compiler=compiler, packages=packages)
    return NodeFacts(
        host,
        cluster,
        driver=found.driver,
        clock_note=clock_note,
        compiler=compiler,
        cores=granted_cores(proc=proc, cgroup=cgroup, affinity=affinity),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        busy=busy,
        packages=packages,
        gpus=tuple(gpu.uuid for gpu in found.devices),
    )
