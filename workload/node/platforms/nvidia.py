"""NVIDIA's GPUs, through NVML.

NVML also lists the processes on a GPU; in a container they may have other numbers there than here,
or be missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import FixedGovernor, Governor
from tuner.workload.node.clocks.governor import TAKES_NONE, NvmlGovernor
from tuner.workload.node.host import (
    ENOUGH_CORES,
    granted_cores,
    shared_memory_bytes,
    usable_cores,
    why_few_cores,
    why_shm_is_small,
)
from tuner.workload.node.meters import Meter
from tuner.workload.node.meters.base import SOCKET, MeterError, NoDriver
from tuner.workload.node.meters.gpus import (
    Gpu,
    cuda_numbering,
    no_gpu_wanted,
    on_twin,
    open_nvml,
    opened_gpus,
    query,
    unusable_gpus,
    visible_gpus,
)
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.node.platforms import nvidia_health
from tuner.workload.node.platforms.base import (
    ClockFacts,
    Counters,
    DeviceFacts,
    GpuFacts,
    Host,
    Platform,
)
from tuner.workload.node.platforms.nvidia_device import cluster_of
from tuner.workload.node.readiness import missing_clocks
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.installed import TorchBuild

#: Memory of an unused GPU: the driver's own share is under 1 % of the shipped kinds'. A
#: process in another container is seen by its memory only.
HELD_SHARE = 0.05
#: A GPU on which no process is seen is in use if it works at each of so many looks, s apart.
CHECKS, CHECK_APART_S = 3, 0.6
#: Ranks that unpin hundreds of gigabytes take longer than the kill that ended them.
RELEASE_LIMIT_S = 60.0
#: Network interface of ranks on one node.
LOOPBACK = "lo"
#: A machine with GPUs is never taken for one of cores unless the user says so.
_UNASKED = (
    "the GPUs of this machine cannot be asked: {} (to use its cores instead: --cluster cpu-2, or "
    "CUDA_VISIBLE_DEVICES=)"
)


class Nvidia(Platform):
    """The visible GPUs."""

    libraries = (("libnvidia-ml.so.1", "nvmlShutdown", "pynvml", "nvmlInit"),)

    @property
    def accelerator(self) -> str:  # type: ignore[override]
        """DeepSpeed's name of the devices; ranks of a twin compute on cores."""
        return "cpu" if on_twin() else "cuda"

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        nvml = partial(NvmlMeter, environ=self.environ)
        superchip = SOCKET.part("superchip")
        opener = superchip and superchip.opener(nvml, self.sys / "class" / "hwmon")
        return {**({"superchip": opener} if opener else {}), "nvml": nvml}

    def open_governor(self, cluster: Cluster, meter: MeterInfo | None = None) -> Governor:
        """Return the governor; it leaves clocks alone unless `Cluster.clock_control` is set."""
        try:
            return NvmlGovernor(environ=self.environ, leave_alone=not cluster.clock_control)
        except MeterError as error:
            return FixedGovernor(f"clocks are set through NVML, and that is not to be had: {error}")

    def clocks(self) -> ClockFacts:
        try:
            governor = NvmlGovernor(environ=self.environ, guarded=False)
        except (MeterError, InputError) as error:
            return ClockFacts(False, f"cannot be set: {error}", str(error))
        governor.close()
        if governor.can_set:
            return ClockFacts(True, "")
        if governor.gpus[0].whole or governor.why_not.endswith(
            TAKES_NONE
        ):  # nobody could permit it
            return ClockFacts(False, governor.why_not, governor.why_not)
        missing = missing_clocks(self.environ, slurm=shutil.which("sbatch") is not None)
        return ClockFacts(False, "not permitted", governor.why_not, (missing,))

    def _each(self, question: Callable[[Gpu], Any]) -> list[Any]:
        with contextlib.suppress(InputError, MeterError), opened_gpus(self.environ) as (_, gpus):
            return [question(gpu) for gpu in gpus]
        return []  # they cannot be asked

    # ---- what is on the GPUs

    def busy(self, own: Collection[int] = ()) -> tuple[str, ...]:
        """Describe other processes on the visible GPUs, a phrase each; empty without GPUs.

        Those that draw a display and an idle MPS server do not count. If NVML lists none of `own`,
        it numbers processes as another container does, and no other can be told from them.
        """
        try:
            nvml = open_nvml()
        except MeterError:
            return ()
        try:
            return self._busy(visible_gpus(nvml, environ=self.environ), own)
        finally:
            query(nvml, None, nvml.nvmlShutdown)

    def _busy(self, gpus: Sequence[Gpu], own: Collection[int]) -> tuple[str, ...]:
        found = [_others(gpu, own, gpu.file_cache_bytes(self.sys)) for gpu in gpus]
        if own and not any(pids & set(own) for pids, _ in found):
            return ()
        phrases = tuple(phrase for _, phrase in found if phrase)
        return phrases or (() if own else _worked_on(gpus))

    def memory_held(self, pids: Collection[int]) -> int | None:
        """Return the memory in use on the fullest GPU, CUDA's context included, bytes."""

        def held(gpu: Gpu) -> int:
            running = gpu.query([], "ComputeRunningProcesses")
            return sum(each.usedGpuMemory or 0 for each in running if each.pid in pids)

        return max(self._each(held), default=0) or None

    def wait_for_release(
        self,
        limit_s: float = RELEASE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> float:
        """Wait until nothing is left on the GPUs; return the seconds that it took."""
        began_s = clock()
        with contextlib.suppress(InputError, MeterError), opened_gpus(self.environ) as (_, gpus):
            while self._busy(gpus, ()) and clock() - began_s <= limit_s:
                sleep(0.1)
        return clock() - began_s

    def faults(self) -> Counters:
        return dict(self._each(lambda gpu: (gpu.uuid, nvidia_health.fault_counters(gpu))))

    # ---- what ranks need

    def memory_nodes(self) -> list[int] | None:
        """Return the memory node of each GPU, in CUDA's order; 0 where there is one only."""
        with opened_gpus(self.environ) as (_, gpus):
            return [_lowest(gpu.query((), "MemoryAffinity", 16, 0)) for gpu in gpus]

    def capabilities(self) -> str:
        with contextlib.suppress(MeterError), opened_gpus(self.environ) as (_, gpus):
            reply = {gpu.capability for gpu in gpus} - {(0, 0)}
            return ";".join(sorted(f"{major}.{minor}" for major, minor in reply))
        return ""

    def why_not_torch(self, build: TorchBuild) -> str:
        if not build.cuda:
            return (
                f"torch {build.version} is built without CUDA; install a build with CUDA "
                "(https://pytorch.org/get-started/locally)"
            )
        try:
            with opened_gpus(self.environ) as (nvml, gpus):
                offered = query(nvml, 0, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
                if offered and offered // 1000 < int(build.cuda.partition(".")[0]):
                    driver = query(nvml, "", lambda: nvml.nvmlSystemGetDriverVersion())
                    return (
                        f"torch {build.version} is built with CUDA {build.cuda}, and the driver "
                        f"{driver} supports CUDA {offered // 1000}.{offered % 1000 // 10}; update "
                        "the driver or install a torch that is built with an older CUDA"
                    )
                for gpu in gpus:
                    major, minor = gpu.capability
                    if major and not build.runs_on((major, minor)):
                        return (
                            f"torch {build.version} has no code for {gpu.name} (compute capability "
                            f"{major}.{minor}), only for {build.architectures}; install a "
                            "build that has it"
                        )
        except MeterError:
            pass
        return ""

    def why_few_cores(self, cores: float, ranks: int, *each: float) -> str:
        return why_few_cores(cores, ranks, *each)

    def warnings(self, ranks: int) -> Sequence[str]:
        # GPUs that are linked need less shared memory.
        few = why_few_cores(granted_cores(), ranks, ENOUGH_CORES)
        small = "" if on_twin() else why_shm_is_small(shared_memory_bytes(), ranks)
        return [*filter(None, (few, small))]

    def rank_environment(
        self, env: Mapping[str, str], ranks: int, own: int, interface: str
    ) -> Mapping[str, str]:
        found = cuda_numbering(env)
        if not on_twin(env):  # whose ranks compute on one core each
            # What this process may use: a batch system often grants less than the machine has.
            share = max(1, usable_cores() // ranks)
            found["OMP_NUM_THREADS"] = str(min(share, own or share))
        if interface not in ("", LOOPBACK) and "NCCL_SOCKET_IFNAME" not in env:
            # Left alone, NCCL takes the first interface that is neither lo nor docker's.
            found["NCCL_SOCKET_IFNAME"] = interface
        return found

    # ---- what the GPUs are

    def facts(self) -> DeviceFacts:
        unseen = DeviceFacts(why_none="none is visible to this process")
        if no_gpu_wanted(self.environ):
            return unseen
        try:
            with opened_gpus(self.environ) as (nvml, gpus):
                driver = str(query(nvml, "", nvml.nvmlSystemGetDriverVersion))
                unusable = unusable_gpus(nvml).items()
                notes = [f"GPU {i} cannot be used: {why}" for i, why in unusable]
                notes += [note for gpu in gpus for note in nvidia_health.notes(gpu, self.sys)]
                return DeviceFacts(
                    tuple(_facts(gpu) for gpu in gpus),
                    driver,
                    "" if gpus else unseen.why_none,
                    notes=tuple(notes),
                )
        except NoDriver as error:
            return DeviceFacts(why_none=f"none: {error}")
        except (InputError, MeterError) as error:
            return DeviceFacts(why_none=str(error), broken=True)

    def cluster(self, host: Host) -> Cluster | None:
        if no_gpu_wanted(self.environ):
            return None
        try:
            with opened_gpus(self.environ, dev=host.dev) as (nvml, gpus):
                try:
                    if not gpus:
                        return None
                    if why := "; ".join(filter(None, map(nvidia_health.unusable, gpus))):
                        raise InputError(why)
                    governor = NvmlGovernor(environ=self.environ, guarded=False)
                    governor.close()
                    return cluster_of(gpus, host.memory_bytes, governor)
                except nvml.NVMLError as error:
                    raise InputError(_UNASKED.format(error)) from error
        except NoDriver:
            return None
        except MeterError as error:
            raise InputError(_UNASKED.format(error)) from error


def _facts(gpu: Gpu) -> GpuFacts:
    keeps = gpu.query(1, "PersistenceMode")
    memory_bytes = query(gpu.nvml, None, lambda: gpu.memory_bytes)
    return GpuFacts(gpu.index, gpu.uuid, gpu.name, memory_bytes, bool(keeps))


def _worked_on(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Describe GPUs that work although no process is seen on them, a phrase each.

    A neighbour that shares a GPU by time slices is in no list. NVML's utilisation is that of up to
    the last second, and a display has some. Without persistence mode the first client starts the
    GPU, which counts as its work: the first look is then thrown away.
    """
    unseen = [gpu for gpu in gpus if not gpu.query([], "GraphicsRunningProcesses")]
    starting = any(gpu.query(1, "PersistenceMode") == 0 for gpu in gpus)
    working = _working(unseen)
    for _ in range(CHECKS - 1 + starting):
        if not working:
            break
        time.sleep(CHECK_APART_S)
        now = _working(unseen)
        working, starting = now if starting else [g for g in working if g in now], False
    return tuple(
        f"GPU {gpu.index} works for a process that cannot be seen from here" for gpu in working
    )


def _working(gpus: Sequence[Gpu]) -> list[Gpu]:
    rates = [(gpu, gpu.query(None, "UtilizationRates")) for gpu in gpus]
    return [gpu for gpu, each in rates if each and each.gpu]


def _others(gpu: Gpu, own: Collection[int], cached_bytes: int) -> tuple[set[int], str]:
    # The compute processes on one GPU, and a phrase if others use it.
    compute = gpu.query([], "ComputeRunningProcesses")
    graphics = gpu.query([], "GraphicsRunningProcesses")
    pids = {process.pid for process in compute}
    # Without the driver's reserve, where NVML tells it apart.
    memory = gpu.query(None, "MemoryInfo", "nvmlMemory_v2") or gpu.query(None, "MemoryInfo")
    # A notebook's kernel that looked at the GPU and now runs tuner does nothing else.
    used_bytes = memory.used - cached_bytes if memory else 0
    idle = {os.getpid()} if memory and used_bytes <= HELD_SHARE * memory.total else set()
    theirs = pids - {process.pid for process in graphics} - set(own) - idle
    if others := sorted(pid for pid in theirs if not _serves(gpu, pid)):
        noun = "processes" if len(others) > 1 else "process"
        return pids, f"GPU {gpu.index} is used by {noun} {', '.join(map(str, others))}"
    if pids or memory is None or not memory.total:
        return pids, ""
    # A display's memory is explained by its processes (Xorg, gnome-shell, a browser).
    held = used_bytes - sum(process.usedGpuMemory or 0 for process in graphics)
    if held <= HELD_SHARE * memory.total:
        return pids, ""
    return pids, (
        f"{held / 2**30:.1f} GiB of GPU {gpu.index}'s memory are held by a process "
        "that cannot be seen from here"
    )


def _serves(gpu: Gpu, pid: int) -> bool:
    # An MPS server only passes on the work of others and has none itself.
    return "nvidia-cuda-mps" in query(gpu.nvml, "", lambda: gpu.nvml.nvmlSystemGetProcessName(pid))


def _lowest(words: Any) -> int:
    # The number of the lowest bit that is set in words of 64 bits; 0 without any.
    bits = sum(int(word) << 64 * at for at, word in enumerate(words))
    return (bits & -bits).bit_length() - 1 if bits else 0
