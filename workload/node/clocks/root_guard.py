"""Clocks of GPUs by joulefront's guard of root, where an administrator has installed it.

The guard (`tuner.workload.node.clocks.guard`) is a process of root's, which a unit or sudo starts.
Nothing else is tried by sudo, because a refused sudo is reported to the administrator.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import shlex
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.workload.node.clocks import guard, own_guard
from tuner.workload.node.clocks.clock_backends import (
    EARLIER,
    ClockBackend,
    NvmlProxy,
    connected,
    earlier_lock,
)
from tuner.workload.node.clocks.own_guard import END_S, GpuHeld
from tuner.workload.node.meters.gpus import Gpu, on_twin

PROTOCOL = 1
#: NVML's word for it.
_LOCK = "GpuLockedClocks"
#: Where an administrator installs the guard, and where its unit listens, or the variable says.
PROGRAM = "/usr/local/sbin/joulefront-guard"
GUARD_SOCKET, DEFAULT_SOCKET = "JOULEFRONT_GUARD_SOCKET", "/run/joulefront-guard.sock"
#: The longest that an answer may take, seconds: of the guard three tries of four settings.
ZEUSD_S, GUARD_S = 10.0, 20.0
#: The longest that an answer may take, seconds: three tries of four settings.
GUARD_S = 20.0
#: What the guard's unit may not do: it needs NVML's devices, a folder in /run, and nothing else.
_CONFINED = (
    "CapabilityBoundingSet=CAP_SYS_ADMIN",
    "NoNewPrivileges=yes",
    "DevicePolicy=closed",
    "'DeviceAllow=char-nvidia* rw'",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "PrivateNetwork=yes",
    "PrivateTmp=yes",
    "RestrictAddressFamilies=AF_UNIX",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "RuntimeDirectory=joulefront",
    "RuntimeDirectoryMode=0700",
    "RuntimeDirectoryPreserve=yes",
    "OOMScoreAdjust=-1000",
    "MemoryMax=256M",
    "TasksMax=16",
)
#: What an administrator does, a clause.
advice = "install joulefront's guard (tuner doctor prints the lines)"


def backend(nvml: Any, gpu: Gpu, environ: Mapping[str, str]) -> ClockBackend | None:
    """Return the guard if it is installed."""
    root = RootGuardNvml(nvml, environ.get(GUARD_SOCKET, ""), earlier_lock(environ))
    if not root.installed:
        return None
    return ClockBackend("guard", root, "", "joulefront's guard", root.why_not, configured)


def user_name() -> str:
    """Return the name of the user, quoted for a shell; "USER" if the system knows none."""
    try:
        return shlex.quote(getpass.getuser())
    except (OSError, KeyError):
        return "USER"


def installation() -> Iterator[str]:
    """Return the lines by which an administrator installs it."""
    user = user_name()
    units = "/etc/systemd/system/joulefront-guard"
    source = Path(guard.__file__).resolve()
    listens = f"ListenStream={DEFAULT_SOCKET} SocketUser={user} SocketMode=0600 Accept=yes"
    unit = f"'[Socket]' {listens} MaxConnections=16 '[Install]' WantedBy=sockets.target"
    run = f"'ExecStart={PROGRAM} {os.getuid()}' StandardInput=socket StandardOutput=journal"
    service = f"'[Unit]' CollectMode=inactive-or-failed '[Service]' {run} {' '.join(_CONFINED)}"
    # The copy is checked, which the user cannot change any more.
    total = hashlib.sha256(source.read_bytes()).hexdigest()
    yield (
        f"guard:  install -o root -m 755 {shlex.quote(str(source))} {PROGRAM}.new && "
        f"echo '{total}  {PROGRAM}.new' | sha256sum -c && mv {PROGRAM}.new {PROGRAM}; "
        "then sudo or unit:"
    )
    yield (
        f"sudo:   rule='{user} ALL=(root) NOPASSWD: {PROGRAM} \"\"'; "
        'echo "$rule" | visudo -cf - && '
        'echo "$rule" | install -m 440 /dev/stdin /etc/sudoers.d/joulefront'
    )
    yield (
        f"unit:   printf '%s\\n' {unit} > {units}.socket; printf '%s\\n' {service} > "
        f"{units}@.service; systemctl enable --now joulefront-guard.socket"
    )


def configured() -> dict[str, Any]:
    """Return the values that the guard of root restores; {} if the file is unreadable."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        return guard.read(str(configured_file()))
    return {}


def configured_file() -> Path:
    """Return the file with an administrator's settings that the guard of root is to restore."""
    twin = f"{os.environ['JOULEFRONT_TWIN']}.configured.json" if on_twin() else ""
    return Path(twin or guard.CONFIGURED)


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
        if list(self._lock_MHz) in ([], configured().get(_LOCK)):
            return ""
        wanted = json.dumps({_LOCK: list(self._lock_MHz)})
        return (
            f"joulefront's guard believes {EARLIER} of an administrator only, who writes "
            f"{wanted} to {configured_file()}"
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
                raise GpuHeld(own_guard.why_held(uuid, own_guard.device_of(nvml, uuid)))
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
