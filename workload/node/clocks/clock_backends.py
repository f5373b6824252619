"""Ways to set the clocks of GPUs, in their order of preference.

1. NVML itself: root, CAP_SYS_ADMIN.
2. Zeus's daemon (`zeusd`), then joulefront's guard of root (`root_guard`): extras, which are asked
   where they are installed.
3. What other distributions bring, by an entry point of the group `joulefront.clocks`.

All but NVML are modules or objects with `PROTOCOL = 1` and `backend(nvml, gpu, environ)`, which
returns a `ClockBackend`, or None where it does not apply. One may have `advice`, what an
administrator does to have it, a clause, and `installation()`, which yields the lines.
`tuner.testing.clocks` has the contract of the governor with it.

NVML itself is not tried: the kernel tells whether the driver would permit it, and looking at a GPU
writes nothing to it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InvalidValue
from tuner.workload.node.clocks import guard
from tuner.workload.node.clocks.base import SOCKET
from tuner.workload.node.meters.gpus import Gpu, on_twin

#: Number of the capability that NVIDIA's driver asks for (linux/capability.h).
CAP_SYS_ADMIN = 21
#: Environment variable with the lock that an administrator has set, MIN,MAX in MHz.
EARLIER = "EARLIER_CLOCKS_MHZ"


class NvmlProxy:
    """Substitute for the pynvml module: queries are NVML's, a subclass makes the changes."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        for verb in ("Set", "Reset"):
            if name.startswith(f"nvmlDevice{verb}"):
                return partial(self._changed, verb, name.removeprefix(f"nvmlDevice{verb}"))
        return getattr(self._nvml, name)

    def _changed(self, verb: str, setting: str, handle: Any, *values: int) -> None:
        if setting not in guard.NAMES:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        self._change(verb, setting, self._nvml.nvmlDeviceGetUUID(handle), values)

    def _change(self, verb: str, setting: str, uuid: str, values: Sequence[int]) -> None:
        raise NotImplementedError


def connected(path: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket of root or this user; OSError without such a listener."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        uid = struct.unpack("3i", credentials)[1]
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"UID {uid} listens at {path}, who is neither root nor this user")
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True)
class ClockBackend:
    """One way to set clocks; `why_not` returns the reason against it, or "".

    `library` is NVML or what stands in for it. `guard` says where the guard process finds it, empty
    for a way that restores by itself. `restored` are the settings that such a way puts back to what
    an administrator has configured; None for a way that takes what stood from its user.
    """

    means: str
    library: Any
    guard: str
    where: str
    why_not: Callable[[], str]
    restored: Callable[[], Collection[str]] | None = None


#: The driver itself.
NVML_MEANS = "locked clocks"


def available_backends(nvml: Any, gpu: Gpu, environ: Mapping[str, str]) -> Iterator[ClockBackend]:
    """Return the ways to lock clocks that this environment offers."""
    yield ClockBackend(
        NVML_MEANS, nvml, "pynvml", "NVML", lambda: "" if has_right() else needs_root(gpu)
    )
    for way in shipped_ways():
        if (found := way.backend(nvml, gpu, environ)) is not None:
            yield found
    for name, plugin in SOCKET.plugins.found.items():
        try:
            found = plugin.backend(nvml, gpu, environ)
        except Exception as error:  # of another distribution: whatever it raises
            why = f"it fails ({type(error).__name__}: {str(error)[:200]})"
            found = ClockBackend(name, nvml, "", f"the plug-in {name!r}", partial(str, why))
        if found is not None:
            yield replace(found, why_not=partial(_why_not, found))


def shipped_ways() -> list[Any]:
    """Return the shipped ways beside NVML that are installed here."""
    return [way for name in ("zeusd", "guard") if (way := SOCKET.part(name)) is not None]


def _why_not(way: ClockBackend) -> str:
    try:
        return way.why_not()
    except Exception as error:  # of another distribution
        return f"it fails ({type(error).__name__}: {str(error)[:200]})"


def needs_root(gpu: Gpu) -> str:
    """Return advice to the administrator where the driver permits no settings."""
    advice = [f"{way.advice}, " for way in shipped_ways()]
    fix = f"{'or ' if advice else ''}fix the clock with: nvidia-smi -i {gpu.index} -lgc MIN,MAX"
    return (
        f"setting clocks and power limits of GPU {gpu.index} needs root; let an administrator "
        f"{''.join(advice)}{fix}; or run tuner in a container with --cap-add SYS_ADMIN"
    )


def has_right(proc: str | Path = "/proc") -> bool:
    """Return True if the driver permits settings to this process: it has CAP_SYS_ADMIN.

    In a rootless container it has that for its namespace only, and the driver asks for the
    machine's (man 7 user_namespaces).
    """
    folder = Path(f"{os.environ['JOULEFRONT_TWIN']}.proc" if on_twin() else proc) / "self"
    try:
        status = (folder / "status").read_text(encoding="utf-8")
        space = (folder / "uid_map").read_text(encoding="utf-8").split()
        effective = int(status.partition("CapEff:")[2].partition("\n")[0], 16)
    except (OSError, ValueError):
        return False
    return bool(effective >> CAP_SYS_ADMIN & 1) and space == ["0", "0", "4294967295"]


def earlier_lock(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the lock that the environment names, or None; InvalidValue for another text."""
    text = environ.get(EARLIER, "")
    if not text:
        return None
    low, comma, high = text.partition(",")
    if not (comma and low.strip().isdecimal() and high.strip().isdecimal()):
        raise InvalidValue(EARLIER, text, "MIN,MAX in MHz")
    return int(low), int(high)
