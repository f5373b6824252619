"""Platforms: what each kind of device provides on a node.

Whatever depends on the kind of the devices asks the platform of the cluster: NVIDIA's GPUs
(`nvidia`), or the processor's cores (`cores`). A third vendor is one more module with a subclass of
`Platform` and its row in `PLATFORMS`.
"""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.workload.platforms.base import Platform
from tuner.workload.platforms.cores import Cores
from tuner.workload.platforms.nvidia import Nvidia

#: By `Device.type`, in the order in which a machine is searched for devices.
PLATFORMS: dict[str, type[Platform]] = {"cuda": Nvidia, "cpu": Cores}


def platform_of(cluster: Cluster) -> Platform:
    """Return the platform of a cluster's devices."""
    return PLATFORMS[cluster.device.type]()
