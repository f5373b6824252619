"""Socket of platforms: the functions of each kind of device on a node, its meters among them.

Whatever depends on the kind of the devices asks the platform of the cluster. NVIDIA's GPUs and the
processor's cores are shipped; another distribution brings its own by an entry point of the group
`joulefront.platforms`, whose name is the `Device.type`, and whose object is a subclass of
`Platform` with `PROTOCOL = 1` (`contrib/amd` is one). `tuner.testing.platforms` has its contract.
"""

from __future__ import annotations

from tuner.search_spaces.cluster import PLATFORM_GROUP, Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import Socket
from tuner.workload.node.platforms.base import Platform

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
    return {**first, **SOCKET.plugins, "cpu": SOCKET.part("cpu")}


def platform_of(cluster: Cluster) -> Platform:
    """Return the platform of a cluster's devices; InputError if none is installed."""
    kind = cluster.device.type
    shipped = kind in SOCKET.shipped
    if (found := SOCKET.part(kind) if shipped else SOCKET.plugins.get(kind)) is None:
        reasons = "".join(f"; {sentence}" for sentence in SOCKET.left_out)
        raise InputError(
            f"devices of type {kind!r} need a platform that is not installed (for 'rocm': pip "
            f"install joulefront-amd){reasons}"
        )
    platform: Platform = found()
    return platform
