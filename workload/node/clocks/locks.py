"""Locks of GPUs: the file that a guard locks, and the search that holds it.

A guard locks the device file of each GPU that it sets, and the kernel releases the lock when the
guard ends. Every process that may use a GPU can lock it, so the guard of root and the agent's own
exclude each other (`tuner.workload.node.clocks.guard.hold`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.workload.node.clocks import guard
from tuner.workload.node.meters.gpus import on_twin, query

#: The start of the name that a guard gives its process; its agent's number follows.
NAME = "guard:"


def device_of(nvml: Any, uuid: str) -> Path | None:
    """Return the device file of a GPU; None if NVML or this machine has none, as under WSL."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    minor = query(nvml, None, lambda: nvml.nvmlDeviceGetMinorNumber(handle))
    own = f"{os.environ['JOULEFRONT_TWIN']}.gpu{{}}" if on_twin() else guard.DEVICE
    path = Path(own.format(minor))
    return path if minor is not None and path.exists() else None


def _uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    return int(status.partition("\nUid:")[2].split()[0])


def _agent(pid: int) -> int:
    """Return the process for which a guard works, or the process itself; OSError if it is gone."""
    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    agent = name.removeprefix(NAME)
    if not (name.startswith(NAME) and agent.isdecimal()):
        return pid
    # Any process can call itself a guard, so a user's is believed about this user only.
    return int(agent) if _uid(pid) in (0, _uid(int(agent))) else pid


def _lock_owners(path: Path) -> Iterator[int]:
    stat = path.stat()
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[1:2] == ["FLOCK"] and words[5] == inode:
            yield int(words[4])


def holder(path: Path) -> str:
    """Return which search holds a device, as "process 4321 of alice", or ""."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for pid in _lock_owners(path):
            agent = _agent(pid)
            uid = _uid(agent)
            try:
                user = pwd.getpwuid(uid).pw_name
            except KeyError:
                user = f"UID {uid}"
            return f"process {agent} of {user}"
    return ""


def why_held(uuid: str, path: Path | None) -> str:
    """Return the sentence for a search whose GPU another search holds."""
    owner = holder(path) if path is not None else ""
    return (
        f"another search{f' ({owner})' if owner else ''} sets the clocks of {uuid}; wait for its "
        "end, or leave the clocks alone with --no-clocks"
    )
