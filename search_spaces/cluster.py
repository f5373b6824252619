"""Clusters: device kind and count, nodes, links, host memory and available clocks.

Facts are data: `data/devices/*.toml` and `data/clusters/*.toml`, each figure with its source; a
user adds a GPU or a cluster by adding a file and naming its path. *This* machine is detected in
`tuner.workload.node.machine`, which may ask NVML; this module only holds facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tuner.search_spaces.data_files import check_keys, find_file, included_names, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue, check_integer
from tuner.search_spaces.options import check_options, limited
from tuner.search_spaces.typed_json import check_fields, names_a_file, plain_text

#: Upper limit of nodes and of devices per node: more than any machine has, and still enumerable.
LARGEST = 100_000


#: Kinds of devices that data files describe: NVIDIA's and AMD's GPUs, and cores of the host.
TYPES = ("cuda", "rocm", "cpu")
#: Entry points by which other distributions bring a platform, named as its kind of device.
PLATFORM_GROUP = "joulefront.platforms"


def _types() -> tuple[str, ...]:
    # Without loading them.
    others = {point.name for point in entry_points(group=PLATFORM_GROUP)}
    return (*TYPES, *sorted(others - set(TYPES)))


@dataclass(frozen=True)
class Device:
    """Kind of accelerator (or, with `type` "cpu", one core that runs one rank).

    Attributes:
        peak_flops: dense bf16 peak, FLOP/s.
        fp32_flops: fp32 peak without tensor cores, FLOP/s; 0 if unknown.
        fp8_flops: dense FP8 peak with a scale of each matrix or row, FLOP/s; 0 if it has none.
        mxfp8_flops: dense FP8 peak with a scale of each 32 values (MX), FLOP/s; likewise.
        max_W: the default power limit (or, for a core, its share of the stated envelope).
        devices_per_limit: the number of devices that share a power limit: 1, or the cores of a
            processor package.
        memory_clock_MHz: the memory clock of the stated bandwidth; None if unknown.
        shares_host_memory: True if a GPU computes in the host's memory and has none of its own.
    """

    name: str
    type: str
    memory_bytes: int = limited(least=0)
    peak_flops: float = limited(least=0)
    memory_bandwidth_Bps: float = limited(least=0)
    idle_W: float = limited(least=0)
    max_W: float = limited(above=0)
    min_limit_W: float | None = limited(default=None, least=0)
    clocks_MHz: tuple[int, ...] = ()
    default_clock_MHz: int | None = limited(default=None, least=0)
    memory_clock_MHz: int | None = limited(default=None, least=0)
    fp32_flops: float = limited(default=0.0, least=0)
    sources: tuple[str, ...] = ()
    devices_per_limit: int = limited(default=1, least=1)
    fp8_flops: float = limited(default=0.0, least=0)
    mxfp8_flops: float = limited(default=0.0, least=0)
    shares_host_memory: bool = False

    def __post_init__(self) -> None:
        where = f"of device {self.name!r}"
        if self.type not in TYPES and self.type not in (types := _types()):
            raise InvalidValue(f"type {where}", self.type, " or ".join(types))
        check_options(self, where)
        clocks = self.clocks_MHz
        legal = isinstance(clocks, tuple) and all(type(c) is int and c > 0 for c in clocks)
        if not legal or list(clocks) != sorted(set(clocks)):
            raise InvalidValue(f"clocks_MHz {where}", clocks, "ascending integers above 0")

    def flops_in_fp8(self, scaling: str) -> float:
        """Return the dense FP8 peak with a kind of scaling (knob `fp8`), FLOP/s; 0 if none."""
        return self.mxfp8_flops if scaling == "mx" else self.fp8_flops

    @property
    def is_gpu(self) -> bool:
        """True if the device has memory and clocks of its own; False for a core of the host."""
        return self.type != "cpu"

    @property
    def plural(self) -> str:
        """The word for several of these devices."""
        return "GPUs" if self.is_gpu else "cores"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory that a rank cannot exceed; None if unknown, or shared with the host."""
        return (self.memory_bytes or None) if self.is_gpu else None

    @property
    def max_limit_W(self) -> float:
        """The highest power limit, that of all devices that share it."""
        return self.max_W * self.devices_per_limit


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of device. A front never mixes two kinds.

    Attributes:
        link_Bps: of one device to the others of its node, bytes per second per direction.
        link_mesh: True if link_Bps is divided among the other devices (each pair has links of its
            own), False if a switch gives all of it to any of them.
        network_Bps: between nodes, bytes per second per device.
        host_memory_Bps: bandwidth of one node's host memory, bytes per second; 0 if unknown.
        host_W: idle power of a node without its devices; 0 if only devices are charged.
        supply_loss: loss of conversion and supply, as a share of the devices' power; 0 if only
            devices are charged.
        nvme_path: a folder on each node's own NVMe drive, for offload; empty if there is none.
        failures_per_node_day: that end a training on the node, for plans; 0 if they are not
            counted.
        restart_s: from a failure until the training goes on.
        checkpoint_s: that saving the state holds the training up.
        checkpoint_interval_s: work between two checkpoints; 0 for the best.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int = 1
    link_Bps: float = limited(default=0.0, least=0)
    network_Bps: float = limited(default=0.0, least=0)
    host_link_Bps: float = limited(default=0.0, least=0)
    host_memory_bytes: int = limited(default=0, least=0)
    host_memory_Bps: float = limited(default=0.0, least=0)
    host_W: float = limited(default=0.0, least=0)
    supply_loss: float = limited(default=0.0, least=0)
    clock_control: bool = limited(default=False)
    sources: tuple[str, ...] = field(default=())
    nvme_path: str = limited(default="")
    link_mesh: bool = limited(default=False)
    failures_per_node_day: float = limited(default=0.0, least=0)
    restart_s: float = limited(default=0.0, least=0)
    checkpoint_s: float = limited(default=0.0, least=0)
    checkpoint_interval_s: float = limited(default=0.0, least=0)

    def __post_init__(self) -> None:
        where = f"of cluster {self.name!r}"
        for name in ("devices_per_node", "nodes"):
            check_integer(f"{name} {where}", getattr(self, name), most=LARGEST)
        check_options(self, where)
        if self.failures_per_node_day and not (self.checkpoint_s or self.checkpoint_interval_s):
            raise InputError(
                f"failures_per_node_day {where} needs checkpoint_s, the seconds that a checkpoint "
                "takes, or checkpoint_interval_s, the work between two: state one"
            )

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.devices_per_node * self.nodes

    @property
    def clocks_MHz(self) -> tuple[int, ...]:
        """Clocks that a search may set; empty if they cannot be set."""
        return self.device.clocks_MHz if self.clock_control else ()


def device_names() -> list[str]:
    """Return the names of the devices that joulefront includes."""
    return included_names("devices")


def cluster_names() -> list[str]:
    """Return the names of the clusters that joulefront includes."""
    return included_names("clusters")


def _build(cls: type, data: Mapping[str, Any], subject: str) -> Any:
    check_keys(data, cls.__dataclass_fields__, subject)  # type: ignore[attr-defined]
    tidy = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    try:
        return check_fields(cls(**tidy), subject)
    except TypeError as error:
        raise InputError(f"{subject} is incomplete: {error}") from error


def load_device(name: str) -> Device:
    """Load a device by shipped name or path. `clocks_MHz` may be a list or {min, max, step}."""
    file, stem = find_file("devices", name, "device")
    data = read_toml(file, f"device {name!r}")
    clocks = data.get("clocks_MHz")
    if isinstance(clocks, dict):
        try:
            low, high, step = (int(clocks[key]) for key in ("min", "max", "step"))
            if low < 1 or step < 1:
                raise ValueError
            data["clocks_MHz"] = list(range(low, min(high, 100_000) + 1, step))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"clocks_MHz of device {name!r} must hold integers min, max and step above 0"
            ) from error
    return _build(Device, {"name": stem, **data}, f"device {stem!r}")


def load_cluster(name: str) -> Cluster:
    """Load a cluster by shipped name or path. `device` names a device file."""
    file, stem = find_file("clusters", name, "cluster")
    data = read_toml(file, f"cluster {name!r}")
    if not isinstance(data.get("device"), str):
        raise InputError(f"cluster {stem!r} names no device; known: {', '.join(device_names())}")
    kind = data["device"]
    if isinstance(file, Path) and names_a_file(file.parent / kind):
        kind = str(file.parent / kind)
    values = {"name": stem, **data, "device": load_device(kind)}
    plain_text(str(values["name"]), f"the name of the cluster in {name}")
    return _build(Cluster, values, f"cluster {stem!r}")


def enlarged(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with this number of devices; InvalidValue if nodes cannot be whole."""
    if gpus < 1 or (gpus > cluster.devices_per_node and gpus % cluster.devices_per_node):
        raise InvalidValue(
            "gpus", gpus, f"a multiple of the {cluster.devices_per_node} devices of a node"
        )
    return replace(cluster, nodes=-(-gpus // cluster.devices_per_node))
