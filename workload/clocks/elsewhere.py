"""NVML with its setters sent elsewhere: to a process that may set what this user may not.

Zeus's daemon is in `tuner.workload.clocks.zeusd`, joulefront's guard in
`tuner.workload.clocks.guard_client`, and their order in `tuner.workload.clocks.ways`.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any


class Elsewhere:
    """Substitute for the pynvml module: queries are NVML's, setters are those of a subclass."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        return self._refuse if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")) else value

    def _refuse(self, *_: object) -> None:
        raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)

    def why_not(self) -> str:
        """Return the reason why this cannot be used here; empty if it may be tried."""
        return ""


def connected(path: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket of root or this user; OSError if nobody or another listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", who)[1]
        if uid not in (0, os.geteuid()):
            raise PermissionError(f"UID {uid} listens at {path}, who is neither root nor this user")
    except BaseException:
        connection.close()
        raise
    return connection
