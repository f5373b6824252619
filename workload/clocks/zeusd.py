"""NVML with its setters sent to Zeus's daemon, for users without the right to set clocks.

`zeusd` (ml-energy/zeus) wraps NVML's setters as HTTP requests on a Unix socket, named by
ZEUSD_SOCK_PATH. `ZeusdNvml` queries NVML itself and sends the setters to the daemon.

Two protocols (zeusd/src/routes/gpu.rs and server.rs). Release 0.2: POST /gpu/INDEX/COMMAND with a
JSON object of the arguments and "block". Release 0.3 and later: POST /gpu/COMMAND with gpu_ids, the
arguments and block as query parameters; there the daemon also tells its GPUs. It numbers those of
the host: in a container that sees some of them, an index is another GPU's. Release 0.5 and later
tells PCI addresses, by which its numbers are looked up; an earlier daemon is used only if it has as
many GPUs as NVML here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from functools import partial
from typing import Any

from tuner.workload.clocks.guard_client import Elsewhere, connected
from tuner.workload.meters.gpus import ask

#: Where Zeus's users name the daemon's socket.
SOCKET = "ZEUSD_SOCK_PATH"
TIMEOUT_S = 10.0
#: What a daemon answers beside 400 or 500 where NVML says NotSupported (zeusd/src/error.rs; NVML's
#: own words are "The requested operation is not available on target device").
_NOT_SUPPORTED = (b"not supported", b"notsupported", b"not available")


class _Connection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("zeusd", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path, TIMEOUT_S)


class ZeusdNvml(Elsewhere):
    """Substitute for the pynvml module whose setters go through the daemon."""

    def __init__(self, nvml: Any, path: str, *, token: str = "") -> None:
        super().__init__(nvml)
        self._path, self._token = path, token
        self._by_query = False  # release 0.3 and later
        self._ids: dict[str, int] = {}  # the daemon's number of each GPU, where it tells
        self._why_not: str | None = None  # None: not yet asked

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        connection = _Connection(self._path)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_UNKNOWN) from error
        finally:
            connection.close()

    def _discover(self) -> str:
        """Find out the protocol and the daemon's number of each GPU; return why not, or ""."""
        status, body = self._request("GET", "/discover")
        told: Any = None
        if status == 200:
            with contextlib.suppress(ValueError):
                told = json.loads(body)
        if not isinstance(told, dict):
            # The first versions of release 0.3 only read every GPU; 0.2 has no such route.
            status, body = self._request("GET", "/gpu/get_cumulative_energy")
            if status in (401, 403):
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NO_PERMISSION)
            with contextlib.suppress(ValueError):
                told = {"gpu_ids": list(json.loads(body))} if status == 200 else None
        if told is None:
            return ""
        self._by_query = True
        if told.get("auth_required") and not self._token:
            return "it asks for a token; set ZEUSD_TOKEN"
        if "gpu-control" not in told.get("enabled_api_groups", ["gpu-control"]):
            return "it does not control GPUs; start it with --enable gpu-control,gpu-read"
        return self._match(told)

    def _match(self, told: dict[str, Any]) -> str:
        """Match the daemon's GPUs with NVML's here, by PCI address or by their number."""
        nvml = self._nvml
        gpus = told.get("gpus", told.get("gpu_ids", []))
        here = nvml.nvmlDeviceGetCount()
        addresses = {
            gpu["pci_address"]: int(gpu["id"])
            for gpu in gpus
            if isinstance(gpu, dict) and "pci_address" in gpu
        }
        for address, number in addresses.items():
            found = ask(nvml, None, partial(nvml.nvmlDeviceGetHandleByPciBusId, address))
            if found is not None:
                self._ids[nvml.nvmlDeviceGetUUID(found)] = number
        if self._ids or (len(gpus) == here and not addresses):
            return ""
        return (
            f"it has {len(gpus)} GPUs and NVML shows {here} here, as in a container with some of "
            "the host's, where the daemon would set GPUs of others"
        )

    def why_not(self) -> str:
        """Return why this daemon must not be used, or ""; NVMLError if it does not answer."""
        if self._why_not is None:
            try:
                self._why_not = self._discover()
            except self._nvml.NVMLError as error:
                if not isinstance(error.__cause__, PermissionError):
                    raise
                self._why_not = str(error.__cause__)
        return self._why_not

    def _post(self, handle: Any, command: str, **arguments: Any) -> None:
        nvml = self._nvml
        if self.why_not():
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        index = nvml.nvmlDeviceGetIndex(handle)
        if self._ids:  # a GPU that the daemon does not have is none of its
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if uuid not in self._ids:
                raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
            index = self._ids[uuid]
        if self._by_query:
            words = {"gpu_ids": index, **arguments, "block": True}
            query = "&".join(f"{name}={str(value).lower()}" for name, value in words.items())
            status, told = self._request("POST", f"/gpu/{command}?{query}")
        else:
            body = json.dumps({**arguments, "block": True})
            status, told = self._request("POST", f"/gpu/{index}/{command}", body)
        if status in (401, 403):
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        if status in (404, 405) or any(words in told.lower() for words in _NOT_SUPPORTED):
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

    return ZeusdNvml(pynvml, os.environ[SOCKET], token=os.environ.get("ZEUSD_TOKEN", ""))
