"""Ways to set the clocks of GPUs, in their order of preference.

1. NVML itself: root, CAP_SYS_ADMIN.
2. Zeus's daemon, where ZEUSD_SOCK_PATH names its socket.
3. joulefront's guard, where an administrator has installed it: nothing else is tried by sudo,
    because a refused sudo is reported to the administrator.
4. Application clocks, where an administrator has permitted them to every user.

NVML itself is not tried: the kernel tells whether the driver would permit it, and looking at a GPU
writes nothing to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InvalidValue
from tuner.workload.clocks.guard_client import SOCKET as GUARD_SOCKET
from tuner.workload.clocks.guard_client import RootGuardNvml
from tuner.workload.clocks.zeusd import SOCKET, ZeusdNvml
from tuner.workload.meters.gpus import Gpu, on_twin

#: Number of the capability that NVIDIA's driver asks for (linux/capability.h).
CAP_SYS_ADMIN = 21

#: Environment variable with the lock that an administrator has set, MIN,MAX in MHz.
EARLIER = "EARLIER_CLOCKS_MHZ"


@dataclass(frozen=True)
class Way:
    """One way to set clocks.

    `guard` says where the guard process finds the same, empty for a way that restores by itself;
    `permitted` is the kernel's answer, None if only a setting that is tried tells.
    """

    means: str
    nvml: Any
    guard: str
    where: str
    permitted: bool | None = None

    def why_not(self, gpu: Gpu) -> str:
        """Return the reason why `gpu` cannot be set so; empty if it may be tried."""
        if self.permitted is False:
            return needs_root(gpu)
        try:
            return str(self.nvml.why_not()) if self.means != "locked clocks" else ""
        except self.nvml.NVMLError as error:
            return str(error)


def ways(nvml: Any, environ: Mapping[str, str]) -> Iterator[Way]:
    """Return the ways to lock clocks that this environment offers."""
    real = nvml is sys.modules.get("pynvml")
    yield Way("locked clocks", nvml, "pynvml", "NVML", has_right() if real else None)
    if path := environ.get(SOCKET):
        daemon = ZeusdNvml(nvml, path, token=environ.get("ZEUSD_TOKEN", ""))
        yield Way(
            "zeusd", daemon, "tuner.workload.clocks.zeusd:from_environment", f"zeusd at {path}"
        )
    root = RootGuardNvml(nvml, environ.get(GUARD_SOCKET, ""), earlier_lock(environ))
    if root.installed:
        yield Way("guard", root, "", "joulefront's guard", True)


def needs_root(gpu: Gpu) -> str:
    """Return what an administrator can do where the driver permits no settings."""
    return (
        f"setting clocks and power limits of GPU {gpu.index} needs root; let an administrator "
        f"start zeusd and name its socket in {SOCKET}, install joulefront's guard (tuner doctor "
        f"prints the lines), fix the clock with: nvidia-smi -i {gpu.index} -lgc MIN,MAX, or permit "
        f"application clocks with: nvidia-smi -i {gpu.index} -acp 0; or run tuner in a container "
        "with --cap-add SYS_ADMIN"
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
