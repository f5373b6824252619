"""Detection of the cluster that this machine is: its visible GPUs, or its usable cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.cluster import Cluster
from tuner.workload.node.host import host_memory, usable_cores
from tuner.workload.node.platforms import platforms
from tuner.workload.node.platforms.base import Host


def detect_cluster(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
    core: str = "cpu-core",
    sys: str | Path = "/sys",
    dev: str | Path = "/dev",
) -> Cluster:
    """Describe this machine as a cluster of its visible GPUs, or of its usable cores without GPUs.

    JOULEFRONT_NVME_PATH in `environ` names a folder on its own drive, `core` the device file of a
    core. InputError if the visible GPUs are of different kinds, or cannot be used or asked.
    """
    total_bytes, _ = host_memory(proc=proc, cgroup=cgroup)
    cores = usable_cores(proc=proc, cgroup=cgroup, affinity=affinity)
    host = Host(total_bytes, cores, core, dev)
    each = (platform(environ, sys=sys).cluster(host) for platform in platforms().values())
    found = next(cluster for cluster in each if cluster is not None)
    path = (os.environ if environ is None else environ).get("JOULEFRONT_NVME_PATH", "")
    return replace(found, nvme_path=path) if path else found
