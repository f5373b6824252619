#!/usr/bin/python3 -IS
"""The clock guard: a small process of root's that sets clocks for a user, and restores them.

An administrator installs this file, which needs the standard library alone; sudo or a unit starts
it with a Unix socket to the user's agent as stdin. Its messages, a line of JSON each, `set` one of
NAMES within what the GPU offers, or `restore`, as the agent's end does, what is configured, else
what NVML told, unless another has set it since. One guard at a time holds a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

#: How often, and how far apart, a setting that would not go back is tried again.
TRIES, WAIT_S = 3, 0.2
#: What is set, by the end of NVML's functions.
NAMES = ("GpuLockedClocks", "MemoryLockedClocks", "PowerManagementLimit")
#: The longest message that root reads, bytes.
LONGEST = 4096
#: The device that is locked, and the note of what stood before, of the GPU with a minor number.
DEVICE, NOTE = "/dev/nvidia{}", "/run/joulefront/{}"
#: What an administrator wants restored, such as {"GpuLockedClocks": [300, 1095]}.
CONFIGURED = "/etc/joulefront-guard.json"
#: NVML's number for a device that another holds.
IN_USE = 19


class NvmlError(Exception):
    """Error of NVML, or a refusal with NVML's number for it (2: invalid argument)."""

    def __init__(self, why: str, value: int = 2) -> None:
        super().__init__(why)
        self.value = value


class Nvml:
    """Minimal binding of NVML for the guard, without a package; OSError if there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, or raise NvmlError."""
        if code := getattr(self._library, name)(*arguments):
            raise NvmlError(self._library.nvmlErrorString(code).decode(), code)

    def handle(self, uuid: str) -> ctypes.c_void_p:
        """Return the handle of a GPU."""
        handle = ctypes.c_void_p()
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def numbers(self, name: str, handle: Any, count: int = 1) -> list[int]:
        """Return the numbers that a function writes to its last arguments."""
        out = [ctypes.c_uint() for _ in range(count)]
        self.call(f"nvmlDeviceGet{name}", handle, *map(ctypes.byref, out))
        return [number.value for number in out]

    def clocks_MHz(self, handle: Any, *memory_MHz: int) -> list[int]:
        """Return the SM clocks that are offered at a memory clock; without one the memory's."""
        count, out = ctypes.c_uint(1024), (ctypes.c_uint * 1024)()
        name = f"nvmlDeviceGetSupported{'Graphics' if memory_MHz else 'Memory'}Clocks"
        self.call(name, handle, *memory_MHz, ctypes.byref(count), out)
        return list(out[: count.value])

    def stands(self, handle: Any, setting: str) -> list[int]:
        """Return the current values; empty for locks, which NVML does not report."""
        return self.numbers(setting, handle) if setting == "PowerManagementLimit" else []

    def require_offered(self, handle: Any, setting: str, values: Sequence[int]) -> None:
        """Raise NvmlError if a GPU does not offer these values."""
        if setting == "PowerManagementLimit":
            offered, count = self.numbers(f"{setting}Constraints", handle, count=2), 1
        else:
            offered, count = self.clocks_MHz(handle), 2
        if setting == "GpuLockedClocks":
            offered = self.clocks_MHz(handle, max(offered))
        good = len(values) == count and all(type(value) is int for value in values)
        limits = (0, *values, max(offered))
        if not good or list(limits) != sorted(limits) or values[-1] < min(offered):
            raise NvmlError(
                f"{setting} takes {min(offered)} to {max(offered)}, not {list(values)!r}"
            )


def read(path: str) -> dict[str, Any]:
    """Return the JSON in a file, or nothing if there is none."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        return dict(json.load(file))
    return {}


def hold(path: str) -> IO[bytes]:
    """Lock a device until its file is closed; BlockingIOError if another process holds it."""
    device = open(path, "rb", buffering=0)  # noqa: SIM115 - its owner closes it, or ends
    fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return device


class Devices:
    """The GPUs that this process holds, by their minor numbers."""

    def __init__(self, nvml: Nvml, configured: Mapping[str, Sequence[int]]) -> None:
        self._nvml, self._configured = nvml, configured
        self._held: dict[int, tuple[Any, IO[bytes]]] = {}
        #: What stood before the first change, then what NVML may tell after the last one.
        self.earlier: dict[int, dict[str, list[Sequence[int]]]] = {}

    def _hold(self, uuid: str) -> tuple[int, Any]:
        """Lock a GPU, take over from a killed guard, and return its number and handle."""
        handle = self._nvml.handle(uuid)
        (minor,) = self._nvml.numbers("MinorNumber", handle)
        if minor not in self._held:
            try:
                device = hold(DEVICE.format(minor))
            except BlockingIOError:
                raise NvmlError("another search sets the clocks of this GPU", IN_USE) from None
            left = read(NOTE.format(minor)).items()
            now = {setting: self._nvml.stands(handle, setting) for setting in NAMES}
            self.earlier[minor] = {setting: was for setting, was in left if now[setting] in was[1:]}
            self._held[minor] = handle, device
        return minor, handle

    def _note(self, minor: int) -> None:
        """Write the original settings to a file of root."""
        path = NOTE.format(minor)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(self.earlier[minor], file)
        os.replace(f"{path}.new", path)

    def set(self, uuid: str, setting: str, values: Sequence[int]) -> None:
        """Set a value of a GPU, MHz or milliwatts, after noting the original; or NvmlError."""
        if setting not in NAMES:
            raise NvmlError(f"{setting!r} is nothing that is set here")
        minor, handle = self._hold(uuid)
        now = self._nvml.stands(handle, setting)
        for wanted in (values, self._configured.get(setting, values)):
            self._nvml.require_offered(handle, setting, wanted)
        was = self.earlier[minor].get(setting, [self._configured.get(setting, now), now])
        # What another has set since is what stood.
        self.earlier[minor][setting] = [was[0] if now in was[1:] else now, now, values]
        self._note(minor)
        self._nvml.call(f"nvmlDeviceSet{setting}", handle, *values)

    def restore(self, uuid: str = "", setting: str = "") -> list[str]:
        """Restore one thing of one GPU, or all; return a sentence for each failure."""
        problems = []
        for minor in self._hold(uuid)[:1] if uuid else self._held:
            for name in [each for each in self.earlier[minor] if setting in ("", each)]:
                problems += self._put_back(minor, name)
            with contextlib.suppress(OSError):  # a full disk keeps no GPU from being restored
                self._note(minor)
        return problems

    def _put_back(self, minor: int, setting: str) -> list[str]:
        stood, *ours = self.earlier[minor][setting]
        for _ in range(TRIES):
            try:
                name = f"nvmlDevice{'Set' if stood else 'Reset'}{setting}"
                if self._nvml.stands(self._held[minor][0], setting) in ours:
                    self._nvml.call(name, self._held[minor][0], *stood)
                del self.earlier[minor][setting]
                return []
            except NvmlError as error:
                why = error
                time.sleep(WAIT_S)
        return [f"the {setting} of GPU {minor} was not put back: {why}"]

    def reply(self, line: bytes) -> dict[str, Any]:
        """Carry out one message and return the answer; one with "error" if it was refused."""
        try:
            message = json.loads(line)
            gpu, setting = message.get("gpu", ""), message.get("what", "")
            if message["verb"] == "set":
                self.set(gpu, setting, message["values"])
            elif message["verb"] != "restore":
                raise NvmlError("the verbs are set and restore")
            elif problems := self.restore(gpu, setting):
                return {"error": "; ".join(problems)}
            return {}
        except NvmlError as error:
            return {"error": str(error), "nvml": error.value}
        except Exception as error:  # whatever is sent, the guard stays to restore
            return {"error": f"the message cannot be obeyed: {type(error).__name__}: {error}"}


def serve(users: Sequence[str]) -> int | str:
    """Set clocks for the process at the other end of stdin; return the settings not restored."""
    try:
        asker = socket.socket(fileno=0)
        credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
    except OSError as error:
        return f"stdin must be a Unix socket to tuner: {error}"

    def announce(reply: dict[str, Any]) -> None:
        # An agent that reads no answers is left.
        asker.sendall(json.dumps(reply).encode() + b"\n", socket.MSG_DONTWAIT)

    try:
        detach(pid)
        # A unit's guard serves the users with these numbers; one that sudo started its caller.
        may = [os.environ["SUDO_UID"]] if "SUDO_UID" in os.environ else [str(os.geteuid()), *users]
        if uid not in map(int, may):
            raise NvmlError(f"UID {uid} may not have clocks set here")
        devices = Devices(Nvml(), read(CONFIGURED))
    except (NvmlError, OSError, TypeError, ValueError) as error:
        with contextlib.suppress(OSError):
            announce({"error": f"joulefront's guard does not start: {error}"})
        return 1
    with contextlib.suppress(KeyboardInterrupt, Exception):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a unit is stopped by it
        # Another process may have this socket, too, and take what `select` saw.
        for line in lines_of(pid, lambda: asker.recv(65536, socket.MSG_DONTWAIT), LONGEST):
            announce(devices.reply(line))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return "\n".join(devices.restore()) or 0


def lines_of(agent: int, take: Callable[[], bytes], longest: float) -> Iterator[bytes]:
    """Yield the agent's lines on stdin until it or its end is gone."""
    buffer, watched = b"", [0]
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3
        watched.append(os.pidfd_open(agent))
    while len(buffer) <= longest:
        # A child of an agent that is gone may keep the pipe open, and go on sending.
        if select.select(watched, [], [])[0] != [0] or not (piece := take()):
            return
        *lines, buffer = (buffer + piece).split(b"\n")
        yield from lines


def detach(agent: int) -> None:
    """Leave the agent's session, control group and limits; OSError or ValueError if they stay."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    with contextlib.suppress(OSError):
        os.setsid()
    for path, text in {
        "/proc/self/comm": f"guard:{agent}",  # by which another search finds this one
        "/proc/self/oom_score_adj": "-1000",
        "/sys/fs/cgroup/cgroup.procs": "0",
    }.items():
        with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8") as file:
            file.write(text)
    for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "RTTIME", "STACK"):
        most = 1024 if name == "NOFILE" else resource.RLIM_INFINITY
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
