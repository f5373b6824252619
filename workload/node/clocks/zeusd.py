"""Clocks of GPUs by Zeus's daemon (`zeusd`, ml-energy/zeus), where its variable names it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tuner.workload.node.clocks.clock_backends import ClockBackend, NvmlProxy, connected
from tuner.workload.node.meters.gpus import Gpu, query

PROTOCOL = 1
#: Environment variable by which Zeus's users name the daemon's socket.
ZEUSD_SOCKET = "ZEUSD_SOCK_PATH"
#: The longest that an answer may take, seconds.
ZEUSD_S = 10.0
#: What zeusd answers beside 400 or 500 where NVML says NotSupported (zeusd/src/error.rs; NVML's
#: own words are "The requested operation is not available on target device").
_NOT_SUPPORTED = (b"not supported", b"notsupported", b"not available")
#: zeusd's word for each thing that is set, and its arguments (zeusd/src/routes/gpu.rs).
_ZEUSD = {
    "PowerManagementLimit": ("power_limit", ("power_limit_mw",)),
    "GpuLockedClocks": ("gpu_locked_clocks", ("min_clock_mhz", "max_clock_mhz")),
    "MemoryLockedClocks": ("mem_locked_clocks", ("min_clock_mhz", "max_clock_mhz")),
}
#: What an administrator does, a clause.
advice = f"start zeusd and name its socket in {ZEUSD_SOCKET}"


def installation() -> Iterator[str]:
    """Return the lines by which an administrator starts it."""
    yield f"zeusd:  systemctl enable --now zeusd; then: export {ZEUSD_SOCKET}=/run/zeusd/zeusd.sock"


def backend(nvml: Any, gpu: Gpu, environ: Mapping[str, str]) -> ClockBackend | None:
    """Return the daemon that the environment names."""
    if not (path := environ.get(ZEUSD_SOCKET)):
        return None
    daemon = ZeusdNvml(nvml, path, token=environ.get("ZEUSD_TOKEN", ""))
    found = f"{__name__}:{zeusd_from_environment.__name__}"
    return ClockBackend("zeusd", daemon, found, f"zeusd at {path}", daemon.why_not)


class _Connection(http.client.HTTPConnection):
    # HTTP over a Unix socket.
    def __init__(self, path: str) -> None:
        super().__init__("zeusd", timeout=ZEUSD_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path, ZEUSD_S)


class ZeusdNvml(NvmlProxy):
    """Substitute for the pynvml module whose setters go through Zeus's daemon, from release 0.5 on.

    The daemon numbers the GPUs of the host: in a container that sees some of them, an index is
    another GPU's. So its numbers are looked up by the PCI addresses that it tells
    (zeusd/src/routes/server.rs).
    """

    def __init__(self, nvml: Any, path: str, *, token: str = "") -> None:
        super().__init__(nvml)
        self._path, self._token = path, token
        self._ids: dict[str, int] = {}  # the daemon's number of each GPU

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        connection = _Connection(self._path)
        try:
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_UNKNOWN) from error
        finally:
            connection.close()

    def why_not(self) -> str:
        """Return why this daemon must not be used, or ""; NVMLError if it does not answer."""
        try:
            status, body = self._request("GET", "/discover")
        except self._nvml.NVMLError as error:
            if isinstance(error.__cause__, PermissionError):
                return str(error.__cause__)
            raise
        status_text: Any = None
        if status == 200:
            with contextlib.suppress(ValueError):
                status_text = json.loads(body)
        if not isinstance(status_text, dict) or "gpus" not in status_text:
            return "it does not tell its GPUs' PCI addresses, as releases before 0.5"
        if status_text.get("auth_required") and not self._token:
            return "it asks for a token; set ZEUSD_TOKEN"
        if "gpu-control" not in status_text.get("enabled_api_groups", ()):
            return "it does not control GPUs; start it with --enable gpu-control,gpu-read"
        nvml = self._nvml
        for gpu in status_text["gpus"]:
            address = gpu["pci_address"]
            found = query(nvml, None, partial(nvml.nvmlDeviceGetHandleByPciBusId, address))
            if found is not None:
                self._ids[nvml.nvmlDeviceGetUUID(found)] = int(gpu["id"])
        return "" if self._ids else "it has none of the GPUs that NVML shows here"

    def _change(self, verb: str, setting: str, uuid: str, values: Sequence[int]) -> None:
        nvml = self._nvml
        if (not self._ids and self.why_not()) or uuid not in self._ids:
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        command, names = _ZEUSD[setting]
        words = {"gpu_ids": self._ids[uuid], **dict(zip(names, values, strict=False))}
        query = "&".join(f"{word}={value}" for word, value in words.items())
        status, status_text = self._request(
            "POST", f"/gpu/{verb.lower()}_{command}?{query}&block=true"
        )
        if status in (401, 403):
            raise nvml.NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
        if status in (404, 405) or any(text in status_text.lower() for text in _NOT_SUPPORTED):
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if status >= 400:
            raise nvml.NVMLError(nvml.NVML_ERROR_INVALID_ARGUMENT)


def zeusd_from_environment() -> ZeusdNvml:
    """Return the real NVML with the daemon that the environment names, for the guard process."""
    import pynvml

    return ZeusdNvml(pynvml, os.environ[ZEUSD_SOCKET], token=os.environ.get("ZEUSD_TOKEN", ""))
