"""Missing permissions and parts of a machine, each with the lines that an administrator runs.

Only what can be had here is missing: a virtual machine without energy counters lacks nothing that
anyone could permit, so its energy is estimated and it is ready.
"""

from __future__ import annotations

import getpass
import importlib.util
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.clocks import guard
from tuner.workload.clocks.cpu import CpuGovernor
from tuner.workload.clocks.guard_client import DEFAULT_SOCKET, PROGRAM
from tuner.workload.clocks.zeusd import SOCKET
from tuner.workload.node.torch_build import TorchBuild, why_torch_cannot_use_gpus

#: Shared memory that NCCL takes for each pair of ranks that do not reach each other by a link, and
#: gloo and data loaders for their queues: 64 MiB, Docker's default, is too small for two ranks
#: (NVIDIA, NCCL documentation, "Troubleshooting, Shared Memory").
SHM_EACH_BYTES = 256 * 2**20
#: Cores for each rank on a GPU. With less than one, ranks wait for each other to launch kernels, so
#: the scheduler is measured; a rank that has one shares it with the threads of autograd, NCCL and
#: the data loader.
LEAST_CORES, ENOUGH_CORES = 1, 4
#: The packages without which nothing trains.
NEEDED = ("torch", "deepspeed", "transformers")


@dataclass(frozen=True)
class Missing:
    """One thing that is not permitted or not there.

    Attributes:
        lines: what an administrator runs; each line serves by itself unless it says "then".
    """

    what: str
    lines: tuple[str, ...] = ()

    def text(self) -> list[str]:
        """Return the thing and its lines as text."""
        return [f"missing     {self.what}", *(f"            {line}" for line in self.lines)]


def user_name() -> str:
    """Return the name of the user, quoted for a shell; "USER" if the system knows none."""
    try:
        return shlex.quote(getpass.getuser())
    except (OSError, KeyError):
        return "USER"


def missing_clocks(environ: Mapping[str, str], *, slurm: bool = False) -> Missing:
    """Return the lines that permit clocks of GPUs to a user without root."""
    lines = [
        f"zeusd:  systemctl enable --now zeusd; then: export {SOCKET}=/run/zeusd/zeusd.sock",
        *_guard_lines(user_name()),
    ]
    if slurm or environ.get("SLURM_JOB_ID"):
        lines.append("slurm:  in Prolog: nvidia-smi -acp 0; in Epilog: nvidia-smi -rac, -acp 1")
        lines.append("        or one clock for a whole job: srun --gpu-freq=MHZ")
    else:
        lines.append(
            "nvidia: nvidia-smi -acp 0 (application clocks for every user, no power limits)"
        )
    return Missing("permission to set the clocks and power limits of the GPUs", tuple(lines))


def _guard_lines(user: str) -> Iterator[str]:
    """Return the lines that install joulefront's guard, and its rule of sudo or its unit."""
    units = "/etc/systemd/system/joulefront-guard"
    source = shlex.quote(str(Path(guard.__file__).resolve()))
    listens = f"ListenStream={DEFAULT_SOCKET} SocketUser={user} SocketMode=0600 Accept=yes"
    unit = f"'[Socket]' {listens} '[Install]' WantedBy=sockets.target"
    service = f"'[Service]' 'ExecStart={PROGRAM} {user}' StandardInput=socket"
    yield f"guard:  install -o root -m 755 {source} {PROGRAM}; then sudo or unit:"
    yield f"sudo:   echo '{user} ALL=(root) NOPASSWD: {PROGRAM} \"\"' > /etc/sudoers.d/joulefront"
    yield (
        f"unit:   printf '%s\\n' {unit} > {units}.socket; printf '%s\\n' {service} > "
        f"{units}@.service; systemctl enable --now joulefront-guard.socket"
    )


def _granted(sentence: str, what: str) -> Missing | None:
    """Return what a sentence of a meter or governor says an administrator can run."""
    found = re.search(r"chgrp \S.*?(?= \(not to everyone|$)", sentence)
    return Missing(what, (found.group(0),)) if found else None


def missing_of_cores(governor: CpuGovernor, rapl_note: str) -> Iterator[Missing]:
    """Return what keeps the energy of cores from being metered and their clocks from being set."""
    rapl = _granted(rapl_note, "permission to read the energy of the processor")
    if rapl is not None:
        yield rapl
    for why, what in (
        (governor.why_no_clock, "permission to set the clocks of the cores"),
        (governor.why_no_limit, "permission to cap the power of the processor"),
    ):
        if found := _granted(why, what):
            yield found


def installed_torch() -> TorchBuild | None:
    """Return the facts of the installed torch, read from its files; None if there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"^__version__ = '([^']*)'", text, flags=re.MULTILINE)
        cuda = re.search(r"^cuda\b[^=]*= '([^']*)'", text, flags=re.MULTILINE)
        return TorchBuild(version.group(1) if version else "", cuda.group(1) if cuda else "")
    return None


def why_shm_is_small(shm_bytes: int, ranks: int) -> str:
    """Return one sentence if /dev/shm is too small for the ranks of one node, else "".

    Args:
        shm_bytes: size of /dev/shm; 0: there is none.
    """
    need_bytes = SHM_EACH_BYTES * ranks
    if ranks < 2 or shm_bytes >= need_bytes:
        return ""
    there = f"has {shm_bytes / 2**20:.0f} MiB" if shm_bytes else "is missing"
    return (
        f"/dev/shm {there}, and {ranks} ranks need {need_bytes / 2**20:.0f} MiB to exchange data; "
        f"start the container with --shm-size={need_bytes // 2**20}m, or as root: "
        f"mount -o remount,size={need_bytes // 2**20}m /dev/shm"
    )


def why_few_cores(cores: float, gpus: int, each: float = LEAST_CORES) -> str:
    """Return one sentence if there are fewer than `each` cores for a GPU's rank, else ""."""
    if not gpus or cores >= each * gpus:
        return ""
    return (
        f"{cores:g} {'core is' if cores == 1 else 'cores are'} granted for {gpus} "
        f"{'GPU' if gpus == 1 else 'GPUs'}, and each rank needs at least {each:g}, or its GPU "
        "waits for it; start on all cores of the node (Slurm: srun --cpu-bind=none "
        '--cpus-per-task="$SLURM_CPUS_ON_NODE"; containers: a larger --cpus or CPU limit), or '
        "choose fewer GPUs by CUDA_VISIBLE_DEVICES"
    )


def missing_parts(
    packages: Mapping[str, str | None],
    compilers: Mapping[str, str | None],
    *,
    gpus: int,
    cores: float,
    shm_bytes: int,
    nvml: Any = None,
) -> Iterator[Missing]:
    """Return what keeps ranks from training here, with what to run."""
    if lacking := [name for name in NEEDED if not packages.get(name)]:
        yield Missing(", ".join(lacking), ("pip install 'joulefront[train]'",))
    torch = installed_torch() if gpus else None
    if torch is not None:
        try:
            if why := why_torch_cannot_use_gpus(torch, nvml=nvml):
                yield Missing(f"a torch that can use the GPUs: {why}")
        except InputError as error:
            yield Missing(f"usable GPUs: {error}")
    if why := why_few_cores(cores, gpus):
        yield Missing(f"cores: {why}")
    if gpus and (why := why_shm_is_small(shm_bytes, gpus)):
        yield Missing(f"shared memory: {why}")
    if lacking := [name for name in ("g++", "ninja") if not compilers.get(name)]:
        yield Missing(
            f"{' and '.join(lacking)}, with which DeepSpeed compiles its optimizer for offload",
            ("apt-get install g++ ninja-build (or: pip install ninja)",),
        )
