"""Socket of platforms: the functions of each kind of device on a node, its meters among them.

Whatever depends on the kind of the devices asks the platform of the cluster. NVIDIA's GPUs and the
processor's cores are shipped; another distribution brings its own by an entry point of the group
`joulefront.platforms`, whose name is the `Device.type`, and whose object is a subclass of
`Platform` with `PROTOCOL = 1` (`contrib/amd` is one). `tuner.testing.platforms` has its contract.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.cluster import PLATFORM_GROUP, Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import Socket
from tuner.workload.node.host import host_memory, usable_cores
from tuner.workload.node.platforms.base import Host, Platform

#: What is shipped, by `Device.type`, in the order in which a machine is searched for devices: those
#: of other distributions come before its cores.
SOCKET = Socket(
    PLATFORM_GROUP,
    "platform",
    1,
    ("meters", "open_meter", "open_governor", "clocks", "busy", "facts", "cluster"),
    {
        "cuda": "tuner.workload.node.platforms.nvidia:Nvidia",
        "cpu": "tuner.workload.node.platforms.cores:Cores",
    },
)


def platforms() -> dict[str, type[Platform]]:
    """Return the platforms by `Device.type`, in the order in which a machine is searched."""
    first = {name: SOCKET.part(name) for name in SOCKET.shipped if name != "cpu"}
    return {**first, **SOCKET.plugins.found, "cpu": SOCKET.part("cpu")}


def platform_of(cluster: Cluster) -> Platform:
    """Return the platform of a cluster's devices; InputError if none is installed."""
    kind = cluster.device.type
    shipped = kind in SOCKET.shipped
    if (found := SOCKET.part(kind) if shipped else SOCKET.plugins.found.get(kind)) is None:
        reasons = "".join(f"; {sentence}" for sentence in SOCKET.plugins.left_out)
        raise InputError(
            f"devices of type {kind!r} need a platform that is not installed (for 'rocm': pip "
            f"install joulefront-amd){reasons}"
        )
    platform: Platform = found()
    return platform


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
