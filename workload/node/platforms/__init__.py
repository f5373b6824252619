"""Platforms: functions of each kind of device on a node.

Whatever depends on the kind of the devices asks the platform of the cluster: NVIDIA's GPUs
(`nvidia`), AMD's (`amd`), or the processor's cores (`cores`). A further vendor is one more module
with a subclass of `Platform`, its row in `PLATFORMS`, its `Device.type` and its constants.
"""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.workload.node.platforms.amd import Amd
from tuner.workload.node.platforms.base import Platform
from tuner.workload.node.platforms.cores import Cores
from tuner.workload.node.platforms.nvidia import Nvidia

#: By `Device.type`, in the order in which a machine is searched for devices.
PLATFORMS: dict[str, type[Platform]] = {"cuda": Nvidia, "rocm": Amd, "cpu": Cores}


def platform_of(cluster: Cluster) -> Platform:
    """Return the platform of a cluster's devices."""
    return PLATFORMS[cluster.device.type]()
