"""Ways to set the clocks of GPUs, in their order of preference.

1. NVML itself: root, CAP_SYS_ADMIN.
2. Zeus's daemon (`zeusd`, ml-energy/zeus), where ZEUSD_SOCK_PATH names its socket.
3. joulefront's guard (`tuner.workload.node.clocks.guard`), where an administrator has installed it:
    nothing else is tried by sudo, because a refused sudo is reported to the administrator.
4. What other distributions bring, by an entry point of the group `joulefront.clocks`: a module or
    object with `PROTOCOL = 1` and `backend(nvml, gpu, environ)`, which returns a `ClockBackend`, or
    None where it does not apply. `tuner.testing.clocks` has the contract of the governor with it.

NVML itself is not tried: the kernel tells whether the driver would permit it, and looking at a GPU
writes nothing to it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.plugins import Socket
from tuner.workload.node.clocks import guard, locks
from tuner.workload.node.clocks.guard_client import END_S, GpuHeld
from tuner.workload.node.meters.gpus import Gpu, on_twin, query

#: Ways to set clocks: what is shipped, and what other distributions bring.
SOCKET = Socket(
    "joulefront.clocks",
    "way to set clocks",
    1,
    ("backend",),
    {
        **dict.fromkeys(("nvml", "zeusd", "guard"), "tuner.workload.node.clocks.clock_backends"),
        "cores": "tuner.workload.node.clocks.cpu",
    },
)
#: Number of the capability that NVIDIA's driver asks for (linux/capability.h).
CAP_SYS_ADMIN = 21
#: Environment variable with the lock that an administrator has set, MIN,MAX in MHz.
EARLIER = "EARLIER_CLOCKS_MHZ"
#: Environment variable by which Zeus's users name the daemon's socket.
ZEUSD_SOCKET = "ZEUSD_SOCK_PATH"
#: NVML's word for it.
_LOCK = "GpuLockedClocks"
#: Where an administrator installs the guard, and where its unit listens, or the variable says.
PROGRAM = "/usr/local/sbin/joulefront-guard"
GUARD_SOCKET, DEFAULT_SOCKET = "JOULEFRONT_GUARD_SOCKET", "/run/joulefront-guard.sock"
#: The longest that an answer may take, seconds: of the guard three tries of four settings.
ZEUSD_S, GUARD_S = 10.0, 20.0
#: What zeusd answers beside 400 or 500 where NVML says NotSupported (zeusd/src/error.rs; NVML's
#: own words are "The requested operation is not available on target device").
_NOT_SUPPORTED = (b"not supported", b"notsupported", b"not available")
#: zeusd's word for each thing that is set, and its arguments (zeusd/src/routes/gpu.rs).
_ZEUSD = {
    "PowerManagementLimit": ("power_limit", ("power_limit_mw",)),
    "GpuLockedClocks": ("gpu_locked_clocks", ("min_clock_mhz", "max_clock_mhz")),
    "MemoryLockedClocks": ("mem_locked_clocks", ("min_clock_mhz", "max_clock_mhz")),
}


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


class RootGuardNvml(NvmlProxy):
    """Substitute for pynvml whose setters a guard of root makes.

    `lock_MHz` is the earlier lock by the user's word, which the guard believes of an administrator
    only.
    """

    def __init__(self, nvml: Any, path: str = "", lock_MHz: Sequence[int] | None = None) -> None:
        super().__init__(nvml)
        self._path, self._lock_MHz = path or DEFAULT_SOCKET, lock_MHz or ()
        self._socket: socket.socket | None = None
        self._sudo: subprocess.Popen[str] | None = None

    @property
    def installed(self) -> bool:
        """True if an administrator has installed the guard: a unit's socket, or root's program."""
        with contextlib.suppress(OSError):
            return stat.S_ISSOCK(os.stat(self._path).st_mode)
        with contextlib.suppress(OSError):
            return os.stat(PROGRAM).st_uid == 0
        return False

    def why_not(self) -> str:
        """Return the reason why this guard does nothing for this process; empty if it does."""
        try:
            if not (why := str(self.query(verb="restore").get("error", ""))):
                return self._why_not_lock()
        except OSError as error:
            why = str(error)
        self._drop()
        return self._sudo_check() or why

    def _why_not_lock(self) -> str:
        if list(self._lock_MHz) in ([], locks.configured().get(_LOCK)):
            return ""
        wanted = json.dumps({_LOCK: list(self._lock_MHz)})
        return (
            f"joulefront's guard believes {EARLIER} of an administrator only, who writes "
            f"{wanted} to {locks.configured_file()}"
        )

    def _connect(self) -> socket.socket:
        if os.path.exists(self._path):
            return connected(self._path, GUARD_S)
        ours, theirs = socket.socketpair()
        ours.settimeout(GUARD_S)
        with theirs:
            self._sudo = subprocess.Popen(
                ["sudo", "-n", PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                start_new_session=True,
            )
        return ours

    def query(self, **message: Any) -> dict[str, Any]:
        """Send one message and return the answer; a guard that was killed is replaced once."""
        fresh = self._socket is None
        try:
            self._socket = self._socket or self._connect()
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            received = b""
            while not received.endswith(b"\n"):
                piece = self._socket.recv(65536)
                if not piece:
                    raise ConnectionError("the guard ended")
                received += piece
            reply: dict[str, Any] = json.loads(received)
            return reply
        except (OSError, ValueError) as error:
            self._drop()
            if fresh:
                raise OSError(str(error)) from error
        return self.query(**message)

    def _sudo_check(self) -> str:
        # As did the guard that it started, which ends without the socket.
        sudo, self._sudo = self._sudo, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return sudo.communicate(timeout=END_S)[1].strip() if sudo is not None else ""
        return ""

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _change(self, verb: str, setting: str, uuid: str, values: Sequence[int]) -> None:
        nvml, end_s = self._nvml, time.monotonic() + END_S
        message = {"verb": "set" if verb == "Set" else "restore", "gpu": uuid, "what": setting}
        while True:
            try:
                reply = self.query(**message, values=values)
            except OSError as error:
                raise nvml.NVMLError(nvml.NVML_ERROR_UNKNOWN) from error
            if reply.get("nvml") != guard.IN_USE:
                break
            if verb == "Reset":  # nothing of this search stands on a GPU that another holds
                return
            if time.monotonic() > end_s:  # a guard that is about to end had its moment
                raise GpuHeld(locks.why_held(uuid, locks.device_of(nvml, uuid)))
            time.sleep(guard.WAIT_S)
        if "error" in reply:
            raise nvml.NVMLError(reply.get("nvml", nvml.NVML_ERROR_UNKNOWN))

    def nvmlShutdown(self) -> None:
        """End the guard, which restores the remaining changes, and NVML."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self.query(verb="restore")
            self._drop()
        self._sudo_check()
        self._nvml.nvmlShutdown()


@dataclass(frozen=True)
class ClockBackend:
    """One way to set clocks; `why_not` returns the reason against it, or "".

    `library` is NVML or what stands in for it. `guard` says where the guard process finds it, empty
    for a way that restores by itself.
    """

    means: str
    library: Any
    guard: str
    where: str
    why_not: Callable[[], str]


def available_backends(nvml: Any, gpu: Gpu, environ: Mapping[str, str]) -> Iterator[ClockBackend]:
    """Return the ways to lock clocks that this environment offers."""
    yield ClockBackend(
        "locked clocks", nvml, "pynvml", "NVML", lambda: "" if has_right() else needs_root(gpu)
    )
    if path := environ.get(ZEUSD_SOCKET):
        daemon = ZeusdNvml(nvml, path, token=environ.get("ZEUSD_TOKEN", ""))
        found = "tuner.workload.node.clocks.clock_backends:zeusd_from_environment"
        yield ClockBackend("zeusd", daemon, found, f"zeusd at {path}", daemon.why_not)
    root = RootGuardNvml(nvml, environ.get(GUARD_SOCKET, ""), earlier_lock(environ))
    if root.installed:
        yield ClockBackend("guard", root, "", "joulefront's guard", root.why_not)
    for name, plugin in SOCKET.plugins.items():
        try:
            way = plugin.backend(nvml, gpu, environ)
        except Exception as error:  # of another distribution: whatever it raises
            why = f"it fails ({type(error).__name__}: {str(error)[:200]})"
            way = ClockBackend(name, nvml, "", f"the plug-in {name!r}", partial(str, why))
        if way is not None:
            yield replace(way, why_not=partial(_why_not, way))


def _why_not(way: ClockBackend) -> str:
    try:
        return way.why_not()
    except Exception as error:  # of another distribution
        return f"it fails ({type(error).__name__}: {str(error)[:200]})"


def needs_root(gpu: Gpu) -> str:
    """Return advice to the administrator where the driver permits no settings."""
    return (
        f"setting clocks and power limits of GPU {gpu.index} needs root; let an administrator "
        f"start zeusd and name its socket in {ZEUSD_SOCKET}, install joulefront's guard (tuner "
        f"doctor prints the lines), or fix the clock with: nvidia-smi -i {gpu.index} -lgc MIN,MAX; "
        "or run tuner in a container with --cap-add SYS_ADMIN"
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
