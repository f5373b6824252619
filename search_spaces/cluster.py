"""Clusters: device kind and count, nodes, links, host memory and available clocks.

Facts are data: `data/catalogue/devices.toml` and `data/clusters/*.toml`, each figure with its
source; a user adds a GPU or a cluster by adding a file and naming its path, or describes a node in
a word (`8xH100`, `tuner.search_spaces.node_names`). *This* machine is detected in
`tuner.workload.node.machine`, which may ask NVML; this module only holds facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tuner.search_spaces.data_files import (
    catalogue,
    check_keys,
    find_file,
    included_names,
    read_toml,
)
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName, check_integer
from tuner.search_spaces.node_names import NodeName, device_tables, read_node
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
        assumed: a sentence on what was not stated, of a node that was described in a word.
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
    assumed: str = limited(default="")

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


#: Of the catalogue's devices: the node that such a device usually has, further words of its name,
#: and how many of it a board holds. No facts of the device itself.
_OF_NODE = ("node", "also_called", "devices_per_board")


def device_names() -> list[str]:
    """Return the names of the devices that joulefront includes."""
    return list(device_tables())


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
    if name in device_tables():
        stem, data = name, device_tables()[name]
        data = {key: value for key, value in data.items() if key not in _OF_NODE}
    elif names_a_file(path := Path(name)):
        stem, data = path.stem, read_toml(path, f"device {name!r}")
    else:
        raise UnknownName("device", name, [*device_names(), "or the path of a toml file"])
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
    """Load a cluster by shipped name, path or description (`8xH100`)."""
    built_in = name in cluster_names() or names_a_file(Path(name))
    if not built_in and (described := read_node(name)) is not None:
        return _described(described, name)
    other = ("or a node such as 8xH100 or 2x4xL40S", "or the path of a toml file")
    file, stem = find_file("clusters", name, "cluster", other=other)
    data = read_toml(file, f"cluster {name!r}")
    if not isinstance(data.get("device"), str):
        raise InputError(f"cluster {stem!r} names no device; known: {', '.join(device_names())}")
    kind = data["device"]
    if isinstance(file, Path) and names_a_file(file.parent / kind):
        kind = str(file.parent / kind)
    values = {"name": stem, **data, "device": load_device(kind)}
    plain_text(str(values["name"]), f"the name of the cluster in {name}")
    return _build(Cluster, values, f"cluster {stem!r}")


#: Figures of a node that are assumed where its description does not state them.
_USUAL = ("link_Bps", "network_Bps", "host_link_Bps", "host_memory_bytes")


def _described(node: NodeName, text: str) -> Cluster:
    """Return the cluster of a description: its devices, in nodes as such devices usually have."""
    table = device_tables()[node.device]
    usual = catalogue("nodes")[table["node"]]
    devices = node.devices_per_node * table.get("devices_per_board", 1)
    figures = {
        "link_Bps": usual["link_Bps"],
        "network_Bps": usual.get("network_Bps") or usual["node_network_Bps"] / devices,
        "host_link_Bps": usual["host_link_Bps"],
        "host_memory_bytes": usual["host_memory_each_bytes"] * devices,
        "host_memory_Bps": usual.get("host_memory_Bps", 0.0) * devices,
        "link_mesh": usual.get("link_mesh", False),
    }
    stated = _figures(node.stated, text)
    device = load_device(node.device)
    name = f"{node.devices_per_node}x{node.device}"
    if node.nodes > 1:
        name = f"{node.nodes}x{name}"
    return Cluster(
        name=",".join([name, *(f"{key}={value}" for key, value in node.stated.items())]),
        device=device,
        devices_per_node=devices,
        nodes=node.nodes,
        sources=(f"{', '.join(k for k in figures if k not in stated)}: {usual['what']}",),
        assumed=_assumed(node, devices, figures, stated, usual["what"]),
        **{"clock_control": bool(device.clocks_MHz), **figures, **stated},
    )


def _figures(stated: Mapping[str, str], text: str) -> dict[str, Any]:
    """Return the figures of a cluster that follow a description."""
    item_types = {item.name: str(item.type) for item in fields(Cluster)}
    may = [n for n, t in item_types.items() if t in ("float", "int", "bool") and n != "nodes"]
    may.remove("devices_per_node")
    check_keys(stated, may, f"{text!r}")
    found: dict[str, Any] = {}
    for name, written in stated.items():
        try:
            value = {"true": True, "false": False}.get(written.lower())
            if item_types[name] == "bool" and value is None:
                raise ValueError
            number = float(written) if value is None else value
            found[name] = number if item_types[name] != "int" else int(number)
        except (ValueError, OverflowError) as error:
            legal = "true or false" if item_types[name] == "bool" else "a number, such as 25e9"
            raise InvalidValue(f"{name} in {text!r}", written, legal) from error
    return found


def _assumed(
    node: NodeName, devices: int, figures: Mapping[str, Any], stated: Mapping[str, Any], what: str
) -> str:
    parts = []
    if node.others:
        parts.append(f"{node.device} is meant, not {' or '.join(node.others)}")
    if devices != node.devices_per_node:
        each = devices // node.devices_per_node
        parts.append(f"each board is {each} devices to PyTorch, so a node has {devices}")
    if left := [f"{n}={_short(figures[n])}" for n in _USUAL if n not in stated]:
        nodes = f"{node.nodes}x" if node.nodes > 1 else ""
        parts.append(
            f"{', '.join(left)} as usual there ({what}); yours go after the name: --cluster "
            f"{nodes}{node.devices_per_node}x{node.device},{left[-1]}"
        )
    return "; ".join(parts)


def _short(figure: float) -> str:
    return f"{figure:.3g}".replace("e+0", "e").replace("e+", "e")


def enlarged(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with this number of devices; InvalidValue if nodes cannot be whole."""
    if gpus < 1 or (gpus > cluster.devices_per_node and gpus % cluster.devices_per_node):
        raise InvalidValue(
            "gpus", gpus, f"a multiple of the {cluster.devices_per_node} devices of a node"
        )
    return replace(cluster, nodes=-(-gpus // cluster.devices_per_node))
