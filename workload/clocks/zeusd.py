"""NVML with its setters sent to Zeus's daemon, for users without the right to set clocks.

`zeusd` (ml-energy/zeus) runs with the right to set clocks and wraps NVML's setters as HTTP requests
on a Unix socket, named by ZEUSD_SOCK_PATH. `ZeusdNvml` replaces the NVML module: it queries NVML
itself and sends the setters to the daemon, so that governor and guard need no change.
(Protocol: zeusd/src/routes/gpu.rs, release 0.2 and later: POST /gpu/INDEX/COMMAND, a JSON object
with the arguments and "block".)
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from typing import Any

__all__ = ["SOCKET", "ZeusdNvml", "from_environment"]

#: Where Zeus's users name the daemon's socket.
SOCKET = "ZEUSD_SOCK_PATH"
TIMEOUT_S = 10.0


class _Connection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("zeusd", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class ZeusdNvml:
    """Substitute for the pynvml module whose setters go through the daemon.

    Args:
        nvml: the NVML that is asked.
        path: the daemon's socket.
    """

    def __init__(self, nvml: Any, path: str) -> None:
        self._nvml, self._path = nvml, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
            raise AttributeError(f"zeusd has no {name}")
        return value

    def _post(self, handle: Any, command: str, **arguments: Any) -> None:
        nvml = self._nvml
        index = nvml.nvmlDeviceGetIndex(handle)
        connection = _Connection(self._path)
        try:
            connection.request(
                "POST",
                f"/gpu/{index}/{command}",
                body=json.dumps({**arguments, "block": True}),
                headers={"Content-Type": "application/json"},
            )
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise nvml.NVMLError(nvml.NVML_ERROR_UNKNOWN) from error
        finally:
            connection.close()
        if status in (401, 403):
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        if status in (404, 405):
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if status >= 400:
            raise nvml.NVMLError(nvml.NVML_ERROR_INVALID_ARGUMENT)

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit_mW: int) -> None:
        """Set the power limit, milliwatts."""
        self._post(handle, "set_power_limit", power_limit_mw=limit_mW)

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: int) -> None:
        """Turn persistence mode on or off."""
        self._post(handle, "set_persistence_mode", enabled=bool(mode))

    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Lock the SM clock to a range, MHz."""
        self._post(handle, "set_gpu_locked_clocks", min_clock_mhz=low, max_clock_mhz=high)

    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:
        """Release the SM clock's lock."""
        self._post(handle, "reset_gpu_locked_clocks")

    def nvmlDeviceSetMemoryLockedClocks(self, handle: Any, low: int, high: int) -> None:
        """Lock the memory clock to a range, MHz."""
        self._post(handle, "set_mem_locked_clocks", min_clock_mhz=low, max_clock_mhz=high)

    def nvmlDeviceResetMemoryLockedClocks(self, handle: Any) -> None:
        """Release the memory clock's lock."""
        self._post(handle, "reset_mem_locked_clocks")


def from_environment() -> ZeusdNvml:
    """Return the real NVML with the daemon that the environment names, for the guard."""
    import pynvml

    return ZeusdNvml(pynvml, os.environ[SOCKET])
