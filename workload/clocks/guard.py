#!/usr/bin/python3 -IS
"""The clock guard: a small process of root's that sets clocks for a user, and restores them.

An administrator installs this file, which needs nothing but the standard library, and sudo or a
unit starts it with a Unix socket to the user's agent as its stdin. It obeys four verbs, a line of
JSON each: `state`, `set` (NAMES, within what the GPU offers, after noting what stood), `restore`
and `end`. It asks the kernel who is at the other end, restores when that process ends, even by
SIGKILL, and opens no path but NVML's.

An agent that has a way to set clocks needs no root, only what restores: that process is in
`tuner.workload.clocks.guard_client` and shares this file's parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pwd
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: How often, and how far apart, a setting that would not go back is tried again.
TRIES, WAIT_S = 3, 0.2
#: What is set, by the end of NVML's functions, and what sentences call it.
NAMES = {
    "GpuLockedClocks": "SM clock lock",
    "MemoryLockedClocks": "memory clock lock",
    "PowerManagementLimit": "power limit",
}
#: The longest message that root reads, bytes; how long it waits for its answer to be taken, s.
LONGEST, TAKEN_S = 4096, 10.0


@dataclass(frozen=True)
class Earlier:
    """Values that stood, MHz or milliwatts as NVML takes them; empty: it is reset."""

    uuid: str
    what: str
    values: tuple[int, ...] = ()


def put_back(nvml: Any, earlier: Sequence[Earlier]) -> list[str]:
    """Restore as many earlier settings as possible; return a sentence for each failure."""
    problems = []
    for old in earlier:
        name = f"nvmlDevice{'Set' if old.values else 'Reset'}{old.what}"
        for attempt in range(TRIES):
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(old.uuid)
                getattr(nvml, name)(handle, *old.values)
                break
            except nvml.NVMLError as error:
                if attempt == TRIES - 1:
                    what = f"the {NAMES[old.what]} of {old.uuid}"
                    problems.append(f"{what} was not put back: {error}")
                else:
                    time.sleep(WAIT_S)
    return problems


class NvmlError(Exception):
    """Error of NVML, or a refusal with NVML's number for it (2: invalid argument)."""

    def __init__(self, why: str, value: int = 2) -> None:
        super().__init__(why)
        self.value = value


class Nvml:
    """What the guard needs of NVML, without a package; OSError if there is none."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise NvmlError(self._library.nvmlErrorString(code).decode(), code)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def numbers(self, name: str, handle: Any, count: int = 1) -> list[int]:
        """Return the numbers that a function writes to its last arguments."""
        out = [ctypes.c_uint() for _ in range(count)]
        self._call(f"nvmlDeviceGet{name}", handle, *map(ctypes.byref, out))
        return [number.value for number in out]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        """Return the handle of a GPU."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def clocks_MHz(self, handle: Any, *memory_MHz: int) -> list[int]:
        """Return the SM clocks that are offered at a memory clock; without one the memory's."""
        count, out = ctypes.c_uint(1024), (ctypes.c_uint * 1024)()
        name = f"nvmlDeviceGetSupported{'Graphics' if memory_MHz else 'Memory'}Clocks"
        self._call(name, handle, *memory_MHz, ctypes.byref(count), out)
        return list(out[: count.value])

    def stands(self, handle: Any, what: str) -> list[int]:
        """Return what stands; empty for locks, for which NVML cannot be asked."""
        return self.numbers(what, handle) if what == "PowerManagementLimit" else []


class Devices:
    """The GPUs that one process has root set, and what stood before."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.earlier: dict[tuple[str, str], Earlier] = {}

    def _require_offered(self, handle: Any, what: str, values: Sequence[int]) -> None:
        """Raise NvmlError if a GPU does not offer these values."""
        nvml, good = self._nvml, len(values) == 2 - (what == "PowerManagementLimit")
        if not good or not all(type(value) is int and value >= 0 for value in values):
            raise NvmlError(f"{what} takes no {list(values)!r}")
        low, high = values[0], values[-1]
        if what == "PowerManagementLimit":
            offered = nvml.numbers(f"{what}Constraints", handle, count=2)
        else:
            offered = nvml.clocks_MHz(handle)
            if what == "GpuLockedClocks":
                offered = nvml.clocks_MHz(handle, max(offered))
        if not (low <= high and min(offered) <= high <= max(offered)):
            limits = f"{min(offered)} to {max(offered)}"
            raise NvmlError(f"{what} {list(values)} is not within {limits}")

    def set(self, uuid: str, what: str, values: Sequence[int], stood: Sequence[int]) -> Earlier:
        """Set one thing of one GPU, after noting what stood, which is returned; or NvmlError.

        Values are as NVML takes them: MHz, or milliwatts. `stood` is what the asker knows to have
        stood, as after a guard that was killed; else empty.
        """
        if what not in NAMES:
            raise NvmlError(f"{what!r} is nothing that is set here")
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        for asked in filter(None, (values or (-1,), stood)):
            self._require_offered(handle, what, asked)
        if (uuid, what) not in self.earlier:
            before = tuple(stood or self._nvml.stands(handle, what))
            self.earlier[uuid, what] = Earlier(uuid, what, before)
        getattr(self._nvml, f"nvmlDeviceSet{what}")(handle, *values)
        return self.earlier[uuid, what]

    def restore(self, uuid: str = "", what: str = "") -> list[str]:
        """Restore one thing of one GPU, or all; return a sentence for each failure."""
        problems = []
        for key, old in list(self.earlier.items()):
            if uuid in ("", old.uuid) and what in ("", old.what):
                said = put_back(self._nvml, [old])
                problems += said
                if not said:
                    del self.earlier[key]
        return problems

    def answer(self, line: bytes) -> dict[str, Any]:
        """Carry out one message and return the answer; one with "error" if it was refused."""
        try:
            message = json.loads(line)
            verb, gpu, what = message["verb"], message.get("gpu", ""), message.get("what", "")
            if verb == "state":
                return {"pid": os.getpid(), "earlier": [asdict(e) for e in self.earlier.values()]}
            if verb == "set":
                old = self.set(gpu, what, message["values"], message.get("stood", ()))
                return {"stood": old.values}
            if verb not in ("restore", "end"):
                raise NvmlError("the verbs are state, set, restore and end")
            problems = self.restore(gpu, what)
            return {"error": "; ".join(problems)} if problems else {}
        except NvmlError as error:
            return {"error": str(error), "nvml": error.value}
        except Exception as error:  # whatever is sent, the guard stays to restore
            return {"error": f"the message cannot be read: {type(error).__name__}"}


def serve(users: Sequence[str]) -> int:
    """Set clocks for the process at the other end of stdin. Return 0 if all was restored, else 1.

    A unit's guard serves the named users; one that sudo started its caller.
    """
    os.chdir("/")
    try:
        asker = socket.socket(fileno=0)
        who = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        asker.settimeout(TAKEN_S)
    except OSError as error:
        print(f"stdin must be a Unix socket to tuner: {error}", file=sys.stderr)
        return 2

    def say(answer: dict[str, Any]) -> None:
        asker.sendall(json.dumps(answer).encode() + b"\n")

    pid, uid, _ = struct.unpack("3i", who)
    try:
        may = {os.geteuid(), *(pwd.getpwnam(name).pw_uid for name in users)}
        if uid not in ({int(os.environ["SUDO_UID"])} if "SUDO_UID" in os.environ else may):
            raise NvmlError(f"UID {uid} may not have clocks set here")
        devices = Devices(Nvml())
    except (KeyError, NvmlError, OSError) as error:
        with contextlib.suppress(OSError):
            say({"error": f"joulefront's guard does not start: {error}"})
        return 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a unit is stopped by it
        for line in lines_of(0, gone(pid), LONGEST):
            say(devices.answer(line))
            if b'"end"' in line:
                break
    except OSError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for problem in (problems := devices.restore()):
            print(problem, file=sys.stderr)
    return 1 if problems else 0


def gone(agent: int) -> int | None:
    """Return a descriptor, readable when the agent ends, unlike a pipe that a child inherited."""
    try:
        return os.pidfd_open(agent)
    except (AttributeError, OSError):
        return None


def lines_of(pipe: int, agent: int | None, longest: int = sys.maxsize) -> Iterator[bytes]:
    """Return what the agent sends, line by line, until it or its end of the pipe is gone."""
    buffer = b""
    watched = [pipe] if agent is None else [pipe, agent]
    while len(buffer) <= longest:
        ready, _, _ = select.select(watched, [], [])
        # If the pipe is not ready the agent is gone, and the pipe is empty.
        piece = os.read(pipe, 65536) if pipe in ready else b""
        if not piece:
            return
        *lines, buffer = (buffer + piece).split(b"\n")
        yield from lines


def ignore_signals() -> None:
    """Let only the end of the agent end the guard, no terminal's or scheduler's signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    ignore_signals()
    sys.exit(serve(sys.argv[1:]))
