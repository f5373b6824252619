"""Socket of platforms: the functions of each kind of device on a node, its meters among them.

Whatever depends on the kind of the devices asks the platform of the cluster. NVIDIA's GPUs and the
processor's cores are shipped; another distribution brings its own by an entry point of the group
`joulefront.platforms`, whose name is the `Device.type`, and whose object is a subclass of
`Platform` with `PROTOCOL = 1` (`contrib/amd` is one). `tuner.testing.platforms` has its contract.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from tuner.search_spaces.cluster import PLATFORM_GROUP, Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import Plugins, Socket, plugins_of
from tuner.workload.node.platforms.base import Platform

SOCKET = Socket(
    PLATFORM_GROUP,
    "platform",
    1,
    ("meters", "open_meter", "open_governor", "clocks", "busy", "facts", "cluster"),
)
#: The platforms of this package by `Device.type`, in the order in which a machine is searched for
#: devices: those of other distributions come before its cores.
SHIPPED = {
    "cuda": "tuner.workload.node.platforms.nvidia:Nvidia",
    "cpu": "tuner.workload.node.platforms.cores:Cores",
}


@cache
def _plugins() -> Plugins:
    return plugins_of(SOCKET, tuple(SHIPPED))


def plugin_notices() -> Sequence[str]:
    """Return a sentence for each platform of another distribution that cannot be used."""
    return _plugins().left_out


def _shipped(name: str) -> type[Platform]:
    module, _, cls = SHIPPED[name].partition(":")
    found: type[Platform] = getattr(importlib.import_module(module), cls)
    return found


def platforms() -> dict[str, type[Platform]]:
    """Return the platforms by `Device.type`, in the order in which a machine is searched."""
    first = {name: _shipped(name) for name in SHIPPED if name != "cpu"}
    return {**first, **_plugins().found, "cpu": _shipped("cpu")}


def platform_of(cluster: Cluster) -> Platform:
    """Return the platform of a cluster's devices; InputError if none is installed."""
    kind = cluster.device.type
    if kind in SHIPPED:
        return _shipped(kind)()
    if (found := _plugins().found.get(kind)) is None:
        reasons = "".join(f"; {sentence}" for sentence in plugin_notices())
        raise InputError(
            f"devices of type {kind!r} need a platform that is not installed (for 'rocm': pip "
            f"install joulefront-amd){reasons}"
        )
    platform: Platform = found()
    return platform
