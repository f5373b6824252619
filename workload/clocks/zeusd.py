"""NVML with its setters sent to Zeus's daemon, for users without the right to set clocks.

`zeusd` (ml-energy/zeus) runs with the right to set clocks and wraps NVML's setters as HTTP requests
on a Unix socket, named by ZEUSD_SOCK_PATH. `ZeusdNvml` replaces the NVML module: it queries NVML
itself and sends the setters to the daemon, so that governor and guard need no change.

Two protocols (zeusd/src/routes/gpu.rs and server.rs). Release 0.2: POST /gpu/INDEX/COMMAND with a
JSON object of the arguments and "block". Release 0.3 and later: POST /gpu/COMMAND with gpu_ids, the
arguments and block as query parameters; there the daemon also tells its GPUs. It numbers those of
the host: in a container that sees some of them, an index is another GPU's, so the daemon is used
only if it has as many GPUs as NVML here.
"""

from __future__ import annotations

import contextlib
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
        self._gpus: int | None = None  # what the daemon counts; 0: release 0.2 does not tell

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if name.startswith(("nvmlDeviceSet", "nvmlDeviceReset")):
            raise AttributeError(f"zeusd has no {name}")
        return value

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection = _Connection(self._path)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_UNKNOWN) from error
        finally:
            connection.close()

    def _count(self) -> int:
        """Return the number of the daemon's GPUs; 0 from release 0.2, which does not tell.

        Release 0.3 answers /discover or, in its first versions, a reading of every GPU.
        """
        for path in ("/discover", "/gpu/get_cumulative_energy"):
            status, body = self._request("GET", path)
            if status in (401, 403):
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NO_PERMISSION)
            if status == 200:
                with contextlib.suppress(ValueError, TypeError):
                    told = json.loads(body)
                    return len(told.get("gpu_ids", told))
        return 0

    def why_not(self) -> str:
        """Return the reason why this daemon must not be used; empty if it may.

        Raises:
            NVMLError: the daemon does not answer, or asks for a token.
        """
        if self._gpus is None:
            self._gpus = self._count()
        here = self._nvml.nvmlDeviceGetCount()
        if self._gpus in (0, here):
            return ""
        return (
            f"it has {self._gpus} GPUs and NVML shows {here} here, as in a container with some of "
            "the host's, where the daemon would set GPUs of others"
        )

    def _post(self, handle: Any, command: str, **arguments: Any) -> None:
        nvml = self._nvml
        if self.why_not():
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        index = nvml.nvmlDeviceGetIndex(handle)
        if self._gpus:
            words = {"gpu_ids": index, **arguments, "block": True}
            query = "&".join(f"{name}={str(value).lower()}" for name, value in words.items())
            status, _ = self._request("POST", f"/gpu/{command}?{query}")
        else:
            body = json.dumps({**arguments, "block": True})
            status, _ = self._request("POST", f"/gpu/{index}/{command}", body)
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
