"""Clusters: device kind and count, nodes, links, host memory and available clocks.

Facts are data: `data/catalogue/devices.toml` and `data/clusters/*.toml`, each figure with its
source; a user adds a GPU or a cluster by adding a file and naming its path, or describes a node in
a word (`8xH100`, `described_node`). *This* machine is detected in
`tuner.workload.node.platforms`, which may ask NVML; this module only holds facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
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
from tuner.search_spaces.fields import (
    check_fields,
    check_options,
    limited,
    names_a_file,
    plain_text,
)

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
    def has_own_memory(self) -> bool:
        """True if what a rank holds on it is counted apart from the host's memory, even where a GPU
        computes in that; False for a core, whose memory is the host's."""
        return self.is_gpu

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory that a rank cannot exceed; None if unknown, or shared with the host."""
        return (self.memory_bytes or None) if self.has_own_memory else None

    @property
    def hiding(self) -> dict[str, str]:
        """Variables that hide from a program the GPUs that a node has beside its cores in use."""
        return {} if self.is_gpu else {"CUDA_VISIBLE_DEVICES": ""}

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


#: Figures of a node that are assumed where its description does not state them, in words.
_USUAL = {
    "link_Bps": "GB/s between its GPUs",
    "network_Bps": "GB/s a GPU between nodes",
    "host_link_Bps": "GB/s to the host",
    "host_memory_bytes": "GB of host memory",
}


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
        assumed=_assumed(node, devices, figures, stated),
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
    node: NodeName, devices: int, figures: Mapping[str, Any], stated: Mapping[str, Any]
) -> str:
    parts = []
    if node.others:
        parts.append(f"{node.device} is meant, not {' or '.join(node.others)}")
    if devices != node.devices_per_node:
        each = devices // node.devices_per_node
        parts.append(f"each board is {each} devices to PyTorch, so a node has {devices}")
    unused = "link_Bps" if devices == 1 else ""
    if left := [name for name in _USUAL if name not in (*stated, unused)]:
        words = ", ".join(f"{_gigas(figures[name])} {_USUAL[name]}" for name in left)
        nodes = f"{node.nodes}x" if node.nodes > 1 else ""
        key = "network_Bps" if nodes and "network_Bps" in left else left[-1]
        value = f"{figures[key]:.3g}".replace("e+0", "e").replace("e+", "e")
        yours = f"{nodes}{node.devices_per_node}x{node.device},{key}={value}"
        parts.append(f"{words} (yours: --cluster {yours})")
    return "; ".join(parts)


def _gigas(figure: float) -> str:
    gigas = figure / 1e9
    return f"{gigas:,.0f}" if gigas >= 100 else f"{gigas:.3g}"


def enlarged(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with this number of devices; InvalidValue if nodes cannot be whole."""
    if gpus < 1 or (gpus > cluster.devices_per_node and gpus % cluster.devices_per_node):
        raise InvalidValue(
            "gpus", gpus, f"a multiple of the {cluster.devices_per_node} devices of a node"
        )
    return replace(cluster, nodes=-(-gpus // cluster.devices_per_node))


# Names of devices and nodes as people and drivers write them: `8xH100`, `NVIDIA A100-SXM4-40GB`.
#
# The devices are those of `data/catalogue/devices.toml`. A name fits a device if each of its words
# is one of the device's, whatever their order; of several that fit, the first in the file is the
# usual.


#: Words that tell no device from another: vendors, brands, kinds of memory, editions.
_IDLE = re.compile(
    r"nvidia|amd|tesla|geforce|quadro|instinct|radeon|corporation|gpus?|tensor|core|generation|"
    r"graphics|accelerators?|oam|workstation|server|edition|hbm\d?e?|gddr\d?x?|ac|lc|\d+-?way"
)
_MEMORY = re.compile(r"(\d+)(?:gi?b?)")
_TIMES = r"\s*[x×*]\s*"
_COUNT = r"[-+]?\d+(?:[.,]\d+)?"
#: Ways to write a node, in the order in which they are tried; h100x8 comes after 2x4090.
_WRITTEN = tuple(
    re.compile(each, re.IGNORECASE)
    for each in (
        rf"(?P<nodes>{_COUNT})(?:{_TIMES}|\s*nodes?\s+(?:of|with)\s+)(?P<each>{_COUNT})"
        rf"(?:{_TIMES}|\s+)(?P<device>.+)",
        rf"(?P<each>{_COUNT})(?:{_TIMES}|\s+)(?P<device>.+)",
        rf"(?P<device>.+?){_TIMES}(?P<each>{_COUNT})",
    )
)
#: What has to be stated of a device that is not known.
_STATE = (
    "or describe it and its node in two toml files (type, memory_bytes, peak_flops, "
    "memory_bandwidth_Bps, idle_W, max_W: docs/adding-a-gpu.md)"
)


@dataclass(frozen=True)
class NodeName:
    """A node that is described in a word.

    Attributes:
        others: devices that the name fits, too.
        stated: figures of the cluster after the name, as text: `8xH100,network_Bps=25e9`.
    """

    nodes: int
    devices_per_node: int
    device: str
    others: tuple[str, ...] = ()
    stated: dict[str, str] = field(default_factory=dict)


@cache
def device_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of the devices that joulefront includes; the usual one of a name first."""
    return catalogue("devices")


@cache
def _words_of(device: str) -> frozenset[str]:
    further = device_tables()[device].get("also_called", ())
    return frozenset(_plain(word) for text in (device, *further) for word in text.split("-"))


@cache
def _known_words() -> frozenset[str]:
    return frozenset(word for device in device_tables() for word in _words_of(device))


def _plain(word: str) -> str:
    word = word.lower()
    if memory := _MEMORY.fullmatch(word):
        return f"{memory[1]}gb"
    return "sxm" if re.fullmatch(r"sxm\d*", word) else word


def _memory(word: str) -> str:
    # "A100-80"
    gigabytes = f"{word}gb"
    return gigabytes if word not in _known_words() and gigabytes in _known_words() else word


def _parts(word: str) -> list[str]:
    # "rtx4090", "h100sxm5", "a10080gb": known words without a space between them.
    plain = _plain(word)
    if plain in _known_words() or _IDLE.fullmatch(plain):
        return [plain]
    for end in range(len(word) - 1, 1, -1):
        if _plain(word[:end]) in _known_words() and len(word) - end > 1:
            rest = _parts(word[end:])
            if all(part in _known_words() for part in rest):
                return [_plain(word[:end]), *rest]
    return [plain]


def devices_called(name: str) -> list[str]:
    """Return the devices that a name fits, the usual one first; none if it names no model."""
    every = (part for word in re.findall(r"\w+", name.lower()[:200]) for part in _parts(word))
    words = {_memory(part) for part in every if not _IDLE.fullmatch(part)}
    if not any(re.search(r"\d", word) and not _MEMORY.fullmatch(word) for word in words):
        return []
    return [device for device in device_tables() if words <= _words_of(device)]


def _readings(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the nodes, devices a node and device of each way to read a description."""
    for written in _WRITTEN:
        if match := written.fullmatch(text):
            counts = match.groupdict()
            yield counts.get("nodes") or "1", counts["each"], counts["device"].strip()


def read_node(text: str) -> NodeName | None:
    """Read the description of a node; None if the text is none.

    Raises:
        InputError: the device is not known, or a count is no whole number; one sentence.
    """
    description, *more = text.strip().split(",")
    if "/" in text or description.endswith(".toml"):
        return None
    readings = list(_readings(description.strip()))
    known = [reading for reading in readings if devices_called(reading[2])]
    if not readings and devices_called(description):
        known = [("1", "1", description)]
    if not known:
        if readings:
            raise _unknown(readings[0][2])
        _refuse_dash(description)
        return None
    nodes, each, name = known[0]
    device, *others = devices_called(name)
    return NodeName(
        nodes=_whole("nodes", nodes, text),
        devices_per_node=_whole("devices of a node", each, text),
        device=device,
        others=tuple(others),
        stated=dict(_stated(more, text)),
    )


def _whole(subject: str, number: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < 1:
        raise InputError(
            f"the number of {subject} in {text!r} is {number}; it must be a whole number above 0, "
            "as in 8xH100 or 2x4xL40S"
        )
    return int(number)


def _stated(words: list[str], text: str) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, value = word.strip().partition("=")
        if not equals:
            raise InputError(
                f"{word.strip()!r} in {text!r} is no figure of a cluster; give NAME=VALUE, as in "
                "8xH100,network_Bps=25e9"
            )
        yield name.strip(), value.strip()


def _unknown(name: str) -> UnknownName:
    models = {_model(device).lower(): _model(device) for device in device_tables()}
    wanted = "-".join(
        part
        for word in re.findall(r"\w+", name.lower()[:200])
        for part in [_plain(word)]
        if not _IDLE.fullmatch(part) and not _MEMORY.fullmatch(part)
    )
    near = get_close_matches(wanted, models, n=3, cutoff=0.6)
    listed = [models[each] for each in near] or list(models.values())
    return UnknownName("device", name, [*listed, _STATE])


def _model(device: str) -> str:
    """Return the name of a device without its form and memory: RTX-4090, H100."""
    kept = [w for w in device.split("-") if not re.fullmatch(r"\d+GB|SXM\d?|PCIe|NVL", w)]
    return "-".join(kept)


def _refuse_dash(text: str) -> None:
    # h100-8 looks like a built-in name, some of which count nodes, others GPUs.
    match = re.fullmatch(r"(.+)-(\d+)", text)
    if match and devices_called(match[1]):
        name = _short_name(match[1])
        raise InputError(
            f"there is no cluster {text!r}; describe a node of so many: --cluster "
            f"{match[2]}x{name}, or NODESxGPUSxDEVICE, as in 2x8x{name}"
        )


def _short_name(name: str) -> str:
    return _model(devices_called(name)[0])
