"""NVIDIA's GPUs, asked through NVML.

From the first uncorrectable memory error on, a GPU fails every program until it is reset, and NVML
counts such errors. NVML also lists the processes on a GPU; in a container they may have other
numbers there than here, or be missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.search_spaces.cluster import Cluster, Device, device_names, load_device
from tuner.search_spaces.errors import InputError
from tuner.workload.clocks.base import FixedGovernor, Governor
from tuner.workload.clocks.governor import NvmlGovernor
from tuner.workload.meters import Meter
from tuner.workload.meters.base import MeterError, NoDriver
from tuner.workload.meters.gpus import (
    Gpu,
    ask,
    cuda_numbering,
    no_gpu_wanted,
    on_twin,
    open_nvml,
    opened_gpus,
    unusable_gpus,
    visible_gpus,
)
from tuner.workload.meters.nvml import NvmlMeter
from tuner.workload.node.host import (
    ENOUGH_CORES,
    granted_cores,
    shared_memory_bytes,
    usable_cores,
    why_few_cores,
    why_shm_is_small,
)
from tuner.workload.node.ops import TorchBuild
from tuner.workload.node.readiness import missing_clocks
from tuner.workload.platforms.base import (
    ClockFacts,
    Counters,
    DeviceFacts,
    GpuFacts,
    Host,
    Platform,
)
from tuner.workload.probe import MeterInfo

#: Memory of an unused GPU: the driver's own share is under 1 % of the shipped kinds'. A
#: process in another container is seen by its memory only.
HELD_SHARE = 0.05
#: Ranks that unpin hundreds of gigabytes take longer than the kill that ended them.
RELEASE_LIMIT_S = 60.0
#: Network interface of ranks on one node.
LOOPBACK = "lo"
#: A machine with GPUs is never taken for one of cores unless the user says so.
_UNASKED = (
    "the GPUs of this machine cannot be asked: {} (to use its cores instead: --cluster cpu-2, or "
    "CUDA_VISIBLE_DEVICES=)"
)
#: Dense 16-bit tensor FLOP a CUDA core and clock: times cores and top clock, about the peaks of the
#: data sheets (V100 125, T4 65, A100 312, A40 150, L40S 362, H100 989, B200 2250, RTX PRO 6000 504
#: TFLOP/s). B300, whose sheet says 2250 to 2500, is taken as B200.
TENSOR_FLOP = {(7, 0): 16, (7, 5): 16, (8, 0): 32, (9, 0): 32, (10, 0): 64, (10, 3): 64}
#: That of all others, as 8.6, 8.9 and 12.0.
OTHER_FLOP = 8
#: GeForce cards run at half the rate when they accumulate in fp32, as training does (NVIDIA's
#: whitepapers of Turing, Ampere, Ada and Blackwell: RTX 2080 Ti 57, 3090 71, 4090 165, 5090 210
#: TFLOP/s).
GEFORCE_RATE = 0.5
#: Bytes per second and lane, each way, by PCIe generation (PCI-SIG).
PCIE_LANE_BPS = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
#: Bytes per second and NVLink, each way: 25 GB/s for NVLink 2 to 4, 50 GB/s for 5 (NVIDIA).
NVLINK_BPS, NVLINK5_BPS, NVLINKS = 25e9, 50e9, 18
#: Bytes per second, each way, between a Grace processor and its GPU (NVIDIA GH200: NVLink-C2C,
#: 900 GB/s in both directions together).
C2C_BPS = 450e9
#: From this compute capability on (Volta) a GPU that is left alone boosts above its default
#: application clock, up to its highest: an RTX A6000 with 1800 MHz runs at 1935 (NVIDIA developer
#: forum, topic 203772).
BOOSTS_FROM = (7, 0)


class Nvidia(Platform):
    """The visible GPUs."""

    libraries = (("libnvidia-ml.so.1", "nvmlShutdown", "pynvml", "nvmlInit"),)
    binds_offload = True

    @property
    def accelerator(self) -> str:  # type: ignore[override]
        """DeepSpeed's name of the devices; ranks of a twin compute on cores."""
        return "cpu" if on_twin() else "cuda"

    def meters(self, cluster: Cluster) -> Mapping[str, Callable[[], Meter]]:
        return {"nvml": lambda: NvmlMeter(environ=self.environ)}

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
            found = [_others(gpu, own) for gpu in visible_gpus(nvml, environ=self.environ)]
        finally:
            ask(nvml, None, nvml.nvmlShutdown)
        if own and not any(pids & set(own) for pids, _ in found):
            return ()
        return tuple(phrase for _, phrase in found if phrase)

    def memory_held(self, pids: Collection[int]) -> int | None:
        """Return what processes hold on the fullest GPU, CUDA's context included, bytes."""

        def held(gpu: Gpu) -> int:
            running = gpu.ask([], "ComputeRunningProcesses")
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
        with contextlib.suppress(InputError, MeterError):
            while self.busy() and clock() - began_s <= limit_s:
                sleep(0.1)
        return clock() - began_s

    def faults(self) -> Counters:
        return dict(self._each(lambda gpu: (gpu.uuid, _fault_counters(gpu))))

    # ---- what ranks need

    def memory_nodes(self) -> list[int] | None:
        """Return the memory node of each GPU, in CUDA's order; 0 where there is one only."""
        with opened_gpus(self.environ) as (_, gpus):
            return [_lowest(gpu.ask((), "MemoryAffinity", 16, 0)) for gpu in gpus]

    def capabilities(self) -> str:
        with contextlib.suppress(MeterError), opened_gpus(self.environ) as (_, gpus):
            told = {gpu.capability for gpu in gpus} - {(0, 0)}
            return ";".join(sorted(f"{major}.{minor}" for major, minor in told))
        return ""

    def why_not_torch(self, build: TorchBuild) -> str:
        if not build.cuda:
            return (
                f"torch {build.version} is built without CUDA; install a build with CUDA "
                "(https://pytorch.org/get-started/locally)"
            )
        try:
            with opened_gpus(self.environ) as (nvml, gpus):
                offered = ask(nvml, 0, lambda: nvml.nvmlSystemGetCudaDriverVersion_v2())
                if offered and offered // 1000 < int(build.cuda.partition(".")[0]):
                    driver = ask(nvml, "", lambda: nvml.nvmlSystemGetDriverVersion())
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
                driver = str(ask(nvml, "", nvml.nvmlSystemGetDriverVersion))
                unusable = unusable_gpus(nvml).items()
                return DeviceFacts(
                    tuple(_facts(gpu) for gpu in gpus),
                    driver,
                    "" if gpus else unseen.why_none,
                    notes=tuple(f"GPU {i} cannot be used: {why}" for i, why in unusable),
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
                    governor = NvmlGovernor(environ=self.environ, guarded=False)
                    governor.close()
                    return _cluster(gpus, host.memory_bytes, governor.can_set)
                except nvml.NVMLError as error:
                    raise InputError(_UNASKED.format(error)) from error
        except NoDriver:
            return None
        except MeterError as error:
            raise InputError(_UNASKED.format(error)) from error


def _facts(gpu: Gpu) -> GpuFacts:
    memory = gpu.ask(None, "MemoryInfo")
    keeps = gpu.ask(1, "PersistenceMode")
    return GpuFacts(gpu.index, gpu.uuid, gpu.name, memory.total if memory else 0, bool(keeps))


def _others(gpu: Gpu, own: Collection[int]) -> tuple[set[int], str]:
    # The compute processes on one GPU, and a phrase if others use it.
    compute = gpu.ask([], "ComputeRunningProcesses")
    graphics = gpu.ask([], "GraphicsRunningProcesses")
    pids = {process.pid for process in compute}
    # Without the driver's reserve, where NVML tells it apart.
    memory = gpu.ask(None, "MemoryInfo", "nvmlMemory_v2") or gpu.ask(None, "MemoryInfo")
    # A notebook's kernel that looked at the GPU and now runs tuner does nothing else.
    idle = {os.getpid()} if memory and memory.used <= HELD_SHARE * memory.total else set()
    theirs = pids - {process.pid for process in graphics} - set(own) - idle
    if others := sorted(pid for pid in theirs if not _serves(gpu, pid)):
        what = "processes" if len(others) > 1 else "process"
        return pids, f"GPU {gpu.index} is used by {what} {', '.join(map(str, others))}"
    if pids or memory is None or not memory.total:
        return pids, ""
    # A display's memory is explained by its processes (Xorg, gnome-shell, a browser).
    held = memory.used - sum(process.usedGpuMemory or 0 for process in graphics)
    if held <= HELD_SHARE * memory.total:
        return pids, ""
    return pids, (
        f"{held / 2**30:.1f} GiB of GPU {gpu.index}'s memory are held by a process "
        "that cannot be seen from here"
    )


def _serves(gpu: Gpu, pid: int) -> bool:
    # An MPS server only passes on the work of others and has none itself.
    return "nvidia-cuda-mps" in ask(gpu.nvml, "", lambda: gpu.nvml.nvmlSystemGetProcessName(pid))


def _fault_counters(gpu: Gpu) -> dict[str, int]:
    kind = "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"
    errors = gpu.ask(None, "TotalEccErrors", kind, "NVML_VOLATILE_ECC")  # none without ECC
    cause = "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR"
    pages = gpu.ask(None, "RetiredPages", cause)
    rows = gpu.ask(None, "RemappedRows")
    found = {
        "uncorrectable memory errors": errors,
        "retired pages": None if pages is None else len(pages),
        "remapped rows": rows and rows[1],
        "failed row remappings": rows and rows[3],
    }
    return {name: int(count) for name, count in found.items() if count is not None}


def _lowest(words: Any) -> int:
    # The number of the lowest bit that is set in words of 64 bits; 0 without any.
    bits = sum(int(word) << 64 * at for at, word in enumerate(words))
    return (bits & -bits).bit_length() - 1 if bits else 0


def _matching(gpu: Gpu) -> Device | None:
    # The shipped device of this product: same model and form, memory within a tenth.
    words = re.split(r"[ -]", gpu.name.upper())
    for name in sorted(device_names(), key=len):
        parts = name.upper().split("-")
        if parts[0] not in words or ("PCIE" in words) != ("PCIE" in parts):
            continue
        device = load_device(name)
        if device.is_gpu and abs(device.memory_bytes / gpu.memory_bytes - 1) < 0.1:
            return device
    return None


def _assumed(gpu: Gpu, max_clock_MHz: int, max_W: float) -> Device:
    cores = gpu.ask(0, "NumGpuCores")
    memory_MHz = gpu.ask(0, "MaxClockInfo", "NVML_CLOCK_MEM")
    bus_bits = gpu.ask(0, "MemoryBusWidth")
    geforce = GEFORCE_RATE if "GEFORCE" in gpu.name.upper() else 1
    flop = TENSOR_FLOP.get(gpu.capability, OTHER_FLOP) * geforce
    peak_flops = cores * max_clock_MHz * 1e6 * flop
    bandwidth_Bps = 2 * memory_MHz * 1e6 * bus_bits / 8  # double data rate
    if not peak_flops or not bandwidth_Bps:
        raise InputError(
            f"{gpu.name} is not one of the shipped devices and NVML does not tell its cores and "
            "memory bus; describe it in a device file and name the cluster with --cluster"
        )
    return Device(
        name=gpu.name,
        type="cuda",
        memory_bytes=0,
        peak_flops=peak_flops,
        memory_bandwidth_Bps=bandwidth_Bps,
        idle_W=0.15 * max_W,
        max_W=max_W,
        sources=(
            f"peak_flops: {cores} cores x {max_clock_MHz} MHz x {flop:g} FLOP, assumed",
            f"memory_bandwidth: 2 x {memory_MHz} MHz x {bus_bits} bits, assumed double data rate",
            "idle_W: 15 % of the power limit, assumed",
        ),
    )


def _device(gpu: Gpu) -> Device:
    max_MHz = gpu.ask(0, "MaxClockInfo", "NVML_CLOCK_SM")
    default_MHz = gpu.ask(0, "DefaultApplicationsClock", "NVML_CLOCK_SM")
    if gpu.capability >= BOOSTS_FROM:
        default_MHz = max_MHz or default_MHz
    default_mW = gpu.ask(0, "PowerManagementDefaultLimit")
    lowest_mW, _ = gpu.ask((0, 0), "PowerManagementLimitConstraints")
    base = _matching(gpu) or _assumed(gpu, max_MHz, default_mW / 1000)
    # A display's processes hold memory that a job does not get.
    shown = gpu.ask([], "GraphicsRunningProcesses")
    return replace(
        base,
        name=base.name + gpu.power_profile(),  # a kind of its own: no study mixes them
        memory_bytes=gpu.memory_bytes - sum(process.usedGpuMemory or 0 for process in shown),
        max_W=default_mW / 1000 or base.max_W,
        min_limit_W=lowest_mW / 1000 or base.min_limit_W,
        clocks_MHz=gpu.clocks_MHz or base.clocks_MHz,
        default_clock_MHz=default_MHz or max_MHz or base.default_clock_MHz,
        sources=(
            f"NVML: memory, power limits and clocks of this machine's {gpu.name}",
            *base.sources,
        ),
    )


def _host_link_Bps(gpu: Gpu) -> float:
    if getattr(gpu.ask(None, "C2cModeInfoV"), "isC2cEnabled", 0):
        return C2C_BPS
    generation = gpu.ask(3, "MaxPcieLinkGeneration")
    return PCIE_LANE_BPS.get(generation, PCIE_LANE_BPS[3]) * gpu.ask(16, "MaxPcieLinkWidth")


def _nvlink_Bps(gpu: Gpu) -> float:
    # All active links, each way; 0 without any.
    active = sum(gpu.ask(0, "NvLinkState", link) for link in range(NVLINKS))
    return active * (NVLINK5_BPS if gpu.capability >= (10, 0) else NVLINK_BPS)


def _cluster(gpus: tuple[Gpu, ...], memory_bytes: int, clock_control: bool) -> Cluster:
    kinds = {gpu.name + gpu.power_profile() for gpu in gpus}
    if len(kinds) > 1:
        raise InputError(
            f"this machine has different GPUs ({', '.join(sorted(kinds))}); choose those of one "
            "kind with CUDA_VISIBLE_DEVICES"
        )
    host_link_Bps = _host_link_Bps(gpus[0])
    return Cluster(
        name="this-machine",
        device=_device(gpus[0]),
        devices_per_node=len(gpus),
        link_Bps=_nvlink_Bps(gpus[0]) or host_link_Bps,
        host_link_Bps=host_link_Bps,
        host_memory_bytes=memory_bytes,
        clock_control=clock_control,
        sources=("detected: NVML, /proc/meminfo; links from their PCIe and NVLink generation",),
    )
