"""What of this host this process may use: cores and memory, by the kernel's own files.

A container or a batch system often grants less than the machine has, through the affinity or the
control group (version 1 or 2). What is granted counts here, never what is built in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from search_spaces.errors import InputError

__all__ = ["host_memory", "usable_cores"]


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group, leaf to root, version 2 and version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = cgroup / controller if names else cgroup
        folder = top / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _number(file: Path) -> float | None:
    """The first number of a file; None where there is none or it says "max"."""
    try:
        return float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def usable_cores(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
) -> int:
    """Cores this process may use: its affinity, or fewer by its control group's quota; 1 or more.

    Args:
        proc, cgroup: where the kernel's files stand.
        affinity: the cores the kernel lets it run on; None asks.
    """
    cores = len(set(os.sched_getaffinity(0) if affinity is None else affinity))
    for folder in _cgroup_folders(Path(proc), Path(cgroup), "cpu"):
        quota = _number(folder / "cpu.max")  # version 2: "QUOTA PERIOD" or "max PERIOD"
        if quota is not None:
            period = float((folder / "cpu.max").read_text().split()[1])
        else:
            quota = _number(folder / "cpu.cfs_quota_us")  # version 1: -1 where there is no limit
            period = _number(folder / "cpu.cfs_period_us") or 100_000.0
        if quota is not None and quota > 0:
            cores = min(cores, math.floor(quota / period))
    return max(1, cores)


def host_memory(
    *, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup"
) -> tuple[int, int]:
    """(memory this process may use, how much of it is free now), bytes.

    Raises:
        InputError: /proc/meminfo cannot be read.
    """
    info: dict[str, int] = {}
    try:
        for line in (Path(proc) / "meminfo").read_text().splitlines():
            name, value = line.split(":", 1)
            info[name] = int(value.split()[0]) * 1024  # it says kB and means KiB
        total, free = info["MemTotal"], info["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"the memory of this machine cannot be read: {error!r}") from error
    for folder in _cgroup_folders(Path(proc), Path(cgroup), "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < total:
                total = int(limit)
                free = min(free, max(0, total - int(_number(folder / used_name) or 0)))
    return total, free
