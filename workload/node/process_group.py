"""Ranks that were started by the user, as they find each other: by their process group's store."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError


def rank_group() -> tuple[int, int, Any]:
    """Return rank, number of ranks, and store; InputError if several have no process group yet."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return dist.get_rank(), dist.get_world_size(), store
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if any(size not in ("", "1") for size in sizes):
        raise InputError(
            "tuner.tuning is entered before its ranks form a process group; enter it after "
            "torch.distributed.init_process_group"
        )
    return 0, 1, None


def publish(store: Any, key: str, address: str) -> None:
    """Send the other ranks the address of a socket on this node."""
    store.set(key, f"{_machine()} {address}")


def published(store: Any, key: str, timeout_s: float) -> str:
    """Return rank 0's address, "" after the timeout; InputError if it is on another node."""
    until = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > until:
            return ""
        time.sleep(0.05)
    machine, _, address = store.get(key).decode().partition(" ")
    if machine != _machine():
        raise InputError("tuner.tuning tunes the ranks of one node, and these are on several")
    return str(address)


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
