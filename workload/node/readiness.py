"""Missing permissions and parts of a machine, each with the lines that an administrator runs.

Only what can be had here is missing: a virtual machine without energy counters lacks nothing that
anyone could permit, so its energy is estimated and it is ready.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.search_spaces.extras import install_command
from tuner.workload.node.clocks import guard
from tuner.workload.node.clocks.clock_backends import DEFAULT_SOCKET, PROGRAM, ZEUSD_SOCKET
from tuner.workload.node.clocks.cpu import CpuGovernor
from tuner.workload.node.host import why_few_cores, why_shm_is_small
from tuner.workload.scripts.launchers.slurm import ONE_CLOCK

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


@dataclass(frozen=True)
class Program:
    """Program of the system that joulefront, or a training below it, starts.

    Attributes:
        brings: what it is for, a clause.
        line: what installs it on Debian and Ubuntu.
    """

    name: str
    brings: str
    line: str


#: The programs whose lack takes something away. Any other that a command line names is its own.
PROGRAMS = (
    Program(
        "g++",
        "with which DeepSpeed compiles its optimizer for offload, and torch.compile its kernels",
        "apt-get install g++",
    ),
    Program("ninja", "with which DeepSpeed compiles its operations", "pip install ninja"),
    Program("bash", "which starts a command line in quotes", "apt-get install bash"),
)
#: The packages without which nothing trains.
NEEDED = ("torch", "deepspeed", "transformers")
#: Those whose versions a study keeps besides.
USED = ("optuna", "ray", *NEEDED)


@dataclass(frozen=True)
class MissingItem:
    """One thing that is not permitted or not there.

    Attributes:
        lines: what an administrator runs; each line serves by itself unless it says "then".
    """

    subject: str
    lines: tuple[str, ...] = ()

    def text(self) -> list[str]:
        """Return the thing and its lines as text."""
        return [f"missing   {self.subject}", *(f"          {line}" for line in self.lines)]


def user_name() -> str:
    """Return the name of the user, quoted for a shell; "USER" if the system knows none."""
    try:
        return shlex.quote(getpass.getuser())
    except (OSError, KeyError):
        return "USER"


def missing_clocks(environ: Mapping[str, str], *, slurm: bool = False) -> MissingItem:
    """Return the lines that permit clocks of GPUs to a user without root."""
    lines = [
        f"zeusd:  systemctl enable --now zeusd; then: export {ZEUSD_SOCKET}=/run/zeusd/zeusd.sock",
        *_guard_lines(user_name()),
    ]
    if slurm or environ.get("SLURM_JOB_ID"):
        lines.append(f"slurm:  one clock for a whole job: {ONE_CLOCK}")
    return MissingItem("permission to set the clocks and power limits of the GPUs", tuple(lines))


def _guard_lines(user: str) -> Iterator[str]:
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


def missing_of_cores(governor: CpuGovernor, energy_grant: str) -> Iterator[MissingItem]:
    """Return the obstacles to metering the cores' energy and setting their clocks."""
    for line, subject in (
        (energy_grant, "permission to read the energy of the processor"),
        (governor.clock_grant, "permission to set the clocks of the cores"),
        (governor.limit_grant, "permission to cap the power of the processor"),
    ):
        if line:
            yield MissingItem(subject, (line,))


def missing_parts(
    packages: Mapping[str, str | None],
    programs: Mapping[str, str | None],
    *,
    gpus: int,
    cores: float,
    shm_bytes: int,
    why_not_torch: str = "",
    import_errors: Mapping[str, str] | None = None,
) -> Iterator[MissingItem]:
    """Return the obstacles to training here, with the commands that remove them."""
    for name, why in (import_errors or {}).items():
        yield MissingItem(f"{name} {packages[name]} that can be imported: {why}")
    if lacking := [name for name in NEEDED if not packages.get(name)]:
        line = install_command("train")
        if not gpus and "torch" in lacking:
            line += " (before it torch's CPU build, or pip installs CUDA's, of 6 GB)"
        yield MissingItem(", ".join(lacking), (line,))
    if why_not_torch:
        yield MissingItem(f"a torch that can use the GPUs: {why_not_torch}")
    if why := why_few_cores(cores, gpus):
        yield MissingItem(f"cores: {why}")
    if gpus and (why := why_shm_is_small(shm_bytes, gpus)):
        yield MissingItem(f"shared memory: {why}")
    for program in PROGRAMS:
        if not programs.get(program.name):
            yield MissingItem(f"{program.name}, {program.brings}", (program.line,))
