"""Names of devices and nodes as people and drivers write them: `8xH100`, `NVIDIA A100-SXM4-40GB`.

The devices are those of `data/catalogue/devices.toml`. A name fits a device if each of its words is
one of the device's, whatever their order; of several that fit, the first in the file is the usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError, UnknownName

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
        raise InputError(
            f"there is no cluster {text!r}; describe a node of so many: --cluster "
            f"{match[2]}x{_short(match[1])}, or NODESxGPUSxDEVICE, as in 2x8x{_short(match[1])}"
        )


def _short(name: str) -> str:
    return _model(devices_called(name)[0])
