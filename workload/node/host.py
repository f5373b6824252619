"""Cores and memory of this host that this process may use, from the kernel's files.

A container or a batch system often grants less than the machine has, through the affinity or the
control group (version 1 or 2). Only the granted part counts here.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tuner.search_spaces.errors import InputError

#: Share of the cores that others may use before a window says so. The agent, Ray and the driver are
#: among them and take 1 or 2 %.
CONTENTION_SHARE = 0.10
#: Shared memory that NCCL takes for each pair of ranks that do not reach each other by a link, and
#: gloo and data loaders for their queues: 64 MiB, Docker's default, is too small for two ranks
#: (NVIDIA, NCCL documentation, "Troubleshooting, Shared Memory").
SHM_EACH_BYTES = 256 * 2**20
#: Cores for each rank on a GPU. With less than one, ranks wait for each other to launch kernels, so
#: the scheduler is measured; a rank that has one shares it with the threads of autograd, NCCL and
#: the data loader.
LEAST_CORES, ENOUGH_CORES = 1, 4


def busy_ticks(cpus: Iterable[int], stat: str | Path = "/proc/stat") -> dict[int, int]:
    """Return busy ticks since boot by core; OSError or ValueError for another file."""
    wanted = frozenset(cpus)
    ticks: dict[int, int] = {}
    # Ten times a second beside the training: a plain read, and no line more than needed.
    with open(stat, "rb", buffering=0) as file:
        data = file.read()
    for line in data.splitlines():
        if not line.startswith(b"cpu"):
            break  # the cores come first, after their sum
        name, *fields = line.split(maxsplit=8)
        if name != b"cpu" and int(name[3:]) in wanted:
            # user nice system idle iowait irq softirq ...; guest time is inside user, and
            # steal is another machine's work (man 5 proc_stat).
            user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            ticks[int(name[3:])] = user + nice + system + irq + softirq
    return ticks


def _fields_of(pid: int, proc: str | Path) -> list[str]:
    # Of /proc/PID/stat, from the third on (man 5 proc_pid_stat); the name may hold spaces.
    return (Path(proc) / str(pid) / "stat").read_text().rpartition(")")[2].split()


#: Ticks of less than this tell no share, seconds.
LEAST_BUSY_S = 0.2


class CommandCores:
    """Use of the cores from construction on, and the share of a command and all below it.

    Attributes:
        used_s: processor time of the command, seconds.
        busy_s: processor time of all processes on the cores that this process may use, seconds.
        waited: share of its time that the command was ready and waited for a core.
    """

    #: Threads of which the wait is read: a sample of thousands.
    MOST_THREADS = 512

    def __init__(self, *, proc: str | Path = "/proc") -> None:
        self._proc = Path(proc)
        self.count = len(os.sched_getaffinity(0))
        self._before = self._ticks()
        self._began_s = self._seen_s = time.monotonic()
        self._threads: dict[str, tuple[int, int]] = {}
        self.used_s = self.busy_s = 0.0

    def _ticks(self) -> dict[int, int]:
        with contextlib.suppress(OSError, ValueError):
            return busy_ticks(os.sched_getaffinity(0), self._proc / "stat")
        return {}

    def look(self, pid: int, used_s: float | None = None) -> None:
        """See what is used until now; `used_s` is the whole time of a command that has ended."""
        now, self._seen_s = self._ticks(), time.monotonic()
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self.busy_s = tick_s * sum(
            max(0, ticks - self._before.get(core, ticks)) for core, ticks in now.items()
        )
        if used_s is not None:
            self.used_s = used_s
            return
        ticks = 0
        for each in {pid, *family(pid, self._proc)} if pid else ():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                # utime, stime, and those of the children that it has waited for.
                ticks += sum(map(int, _fields_of(each, self._proc)[11:15]))
                for task in (self._proc / str(each) / "task").iterdir():
                    if len(self._threads) < self.MOST_THREADS or str(task) in self._threads:
                        ran_ns, waited_ns, _ = (task / "schedstat").read_text().split()
                        self._threads[str(task)] = int(ran_ns), int(waited_ns)
        self.used_s = max(self.used_s, tick_s * ticks)

    @property
    def waited(self) -> float:
        ran_ns, waited_ns = (
            sum(each) for each in zip((0, 0), *self._threads.values(), strict=True)
        )
        return waited_ns / (ran_ns + waited_ns) if ran_ns + waited_ns else 0.0

    @property
    def idle(self) -> float:
        """Share of the cores' time in which they did nothing; NaN if unknown."""
        seconds = (self._seen_s - self._began_s) * self.count
        if not self._before or seconds <= 0:
            return math.nan
        return min(1.0, max(0.0, 1.0 - self.busy_s / seconds))

    @property
    def share(self) -> float:
        """Share of the cores' busy time that was the command's; NaN if too short to tell."""
        if not self._before or self.busy_s < LEAST_BUSY_S:
            return math.nan
        return min(1.0, self.used_s / self.busy_s)


class CpuContention:
    """Use of the cores by processes other than the given ones, from construction on."""

    def __init__(
        self, pids: Iterable[int], cpus: Iterable[int], *, proc: str | Path = "/proc"
    ) -> None:
        self._pids, self._cpus, self._proc = tuple(pids), frozenset(cpus), Path(proc)
        self._began_s = time.monotonic()
        self._busy, self._own = self._ticks()

    def _ticks(self) -> tuple[int, int]:
        busy = sum(busy_ticks(self._cpus, self._proc / "stat").values())
        own = 0
        for pid in self._pids:
            with contextlib.suppress(OSError):  # it has ended: its last share counts as others'
                own += sum(map(int, _fields_of(pid, self._proc)[11:13]))  # utime and stime
        return busy, own

    def share(self, elapsed_s: float | None = None) -> float:
        """Return the share of the cores' time since construction that others used, 0 to 1."""
        busy, own = self._ticks()
        elapsed_s = time.monotonic() - self._began_s if elapsed_s is None else elapsed_s
        ticks = elapsed_s * os.sysconf("SC_CLK_TCK") * len(self._cpus)
        others = (busy - self._busy) - (own - self._own)
        return min(max(others / ticks, 0.0), 1.0) if ticks > 0 else 0.0


def cgroup_folders(proc: Path, cgroup: Path, controller: str, pid: str = "self") -> Iterator[Path]:
    """Return the folders of a process's control group, leaf to root, version 2 and 1."""
    try:
        lines = (proc / pid / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = cgroup / controller if names else cgroup
        folder = top / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _number(file: Path) -> float | None:
    try:
        return float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def oom_kills() -> int:
    """Return the kernel's count of processes that it killed for want of memory."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def ends_as_one(*, proc: str | Path = "/proc", cgroup: str | Path = "/sys/fs/cgroup") -> bool:
    """Return True if the kernel ends all processes of the group when one fills the memory.

    Kubernetes sets it for each container from release 1.28 on (memory.oom.group, cgroup v2).
    """
    folders = cgroup_folders(Path(proc), Path(cgroup), "memory")
    return any(_number(folder / "memory.oom.group") == 1 for folder in folders)


def family(pid: int, proc: str | Path = "/proc") -> set[int]:
    """Return all processes below `pid`, which is left out."""
    found: set[int] = set()
    left = [pid]
    while left:
        for tasks in Path(proc, str(left.pop()), "task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                children = {int(word) for word in tasks.read_text().split()} - found
                found |= children
                left += children
    return found


def granted_cores(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
) -> float:
    """Return the cores this process may use, by affinity and control group quota."""
    cores = float(len(set(os.sched_getaffinity(0) if affinity is None else affinity)))
    for folder in cgroup_folders(Path(proc), Path(cgroup), "cpu"):
        quota = _number(folder / "cpu.max")  # version 2: "QUOTA PERIOD" or "max PERIOD"
        if quota is not None:
            period = float((folder / "cpu.max").read_text().split()[1])
        else:
            quota = _number(folder / "cpu.cfs_quota_us")  # version 1: -1 where there is no limit
            period = _number(folder / "cpu.cfs_period_us") or 100_000.0
        if quota is not None and quota > 0:
            cores = min(cores, quota / period)
    return cores


def usable_cores(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
) -> int:
    """Return the number of whole cores among the granted ones, at least 1."""
    return max(1, math.floor(granted_cores(proc=proc, cgroup=cgroup, affinity=affinity)))


def core_ranges(cores: Iterable[int]) -> str:
    """Return core numbers in the kernel's list format, e.g. "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


def _device_memory(nodes: Path) -> tuple[int, int]:
    total = free = 0
    for folder in nodes.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if (folder / "cpulist").read_text().strip():
                continue
            for line in (folder / "meminfo").read_text().splitlines():
                _, _, name, value, *_ = line.split()  # "Node 1 MemTotal: 99 kB"
                total += int(value) * 1024 if name == "MemTotal:" else 0
                free += int(value) * 1024 if name == "MemFree:" else 0
    return total, free


def shared_memory_bytes(folder: str | Path = "/dev/shm") -> int:
    """Return the size of the folder through which ranks on one host exchange data; 0: none."""
    return shutil.disk_usage(folder).total if Path(folder).is_dir() else 0


def host_memory(
    *,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    nodes: str | Path = "/sys/devices/system/node",
) -> tuple[int, int]:
    """Return the memory this process may use, and the part of it that is free, bytes.

    NUMA nodes without processors hold a device's memory, which is left out.
    """
    info: dict[str, int] = {}
    try:
        for line in (Path(proc) / "meminfo").read_text().splitlines():
            name, value = line.split(":", 1)
            info[name] = int(value.split()[0]) * 1024  # it says kB and means KiB
        total, free = info["MemTotal"], info["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"the memory of this machine cannot be read: {error!r}") from error
    device_total, device_free = _device_memory(Path(nodes))
    if device_total < total:
        total, free = total - device_total, max(0, free - device_free)
    for folder in cgroup_folders(Path(proc), Path(cgroup), "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < total:
                total = int(limit)
                free = min(free, max(0, total - int(_number(folder / used_name) or 0)))
    return total, free


def why_shm_is_small(shm_bytes: int, ranks: int) -> str:
    """Return one sentence if /dev/shm is too small for the ranks of one node, else ""."""
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
        "waits for it; start on all cores of the node (Slurm: --cpu-bind=none "
        '--cpus-per-task="$SLURM_CPUS_ON_NODE"; containers: a larger --cpus or CPU limit), or '
        "choose fewer GPUs by CUDA_VISIBLE_DEVICES"
    )
