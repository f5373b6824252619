"""NVIDIA GPUs as devices: what they are, what they take, and whether they are healthy, by NVML.

What NVML does not tell is taken from the shipped device of the same product, else assumed, and the
device's sources say so: laptops' GPUs tell no power limit, and a GPU that computes in the host's
memory (GB10) tells no memory. From the first uncorrectable memory error on, a GPU fails every
program until it is reset, and NVML counts such errors. NVML also lists the processes on a GPU; in a
container they may have other numbers there than here, or be missing.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster, Device, devices_called, load_device
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
from tuner.workload.node.platforms.base import (
    ClockFacts,
    Counters,
    DeviceFacts,
    GpuFacts,
    Host,
    Platform,
    missing_clocks,
)
from tuner.workload.records.probe import MeterInfo
from tuner.workload.scripts.installed import TorchBuild

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
#: Reasons for which a figure is not NVML's.
NO_LIMIT, NO_MEMORY = "NVML tells no power limit", "NVML tells none"
#: Joules a CUDA core and 10^12 clock cycles, where neither NVML nor a device file tells a power
#: limit. Power limits of laptops over cores and top clock are 7 to 17 (RTX 4090 Laptop 150 W, RTX
#: 3070 Laptop 115 W, RTX 2070 Max-Q 80 W; NVIDIA's product pages).
ASSUMED_J = 10.0


def _matching(gpu: Gpu) -> Device | None:
    # The known device of this product: its name fits, and its memory within a tenth.
    found = [load_device(name) for name in devices_called(gpu.name)]
    for device in found:
        if gpu.memory_bytes is None or abs(device.memory_bytes / gpu.memory_bytes - 1) < 0.1:
            return device
    return None


def _assumed(gpu: Gpu, max_clock_MHz: int, limit_W: float | None) -> Device:
    cores = gpu.query(0, "NumGpuCores")
    memory_MHz = gpu.query(0, "MaxClockInfo", "NVML_CLOCK_MEM")
    bus_bits = gpu.query(0, "MemoryBusWidth")
    geforce = GEFORCE_RATE if "GEFORCE" in gpu.name.upper() else 1
    flop = TENSOR_FLOP.get(gpu.capability, OTHER_FLOP) * geforce
    peak_flops = cores * max_clock_MHz * 1e6 * flop
    bandwidth_Bps = 2 * memory_MHz * 1e6 * bus_bits / 8  # double data rate
    if not peak_flops or not bandwidth_Bps:
        raise InputError(
            f"{gpu.name} is not one of the shipped devices and NVML does not tell its cores and "
            "memory bus; describe it in a device file and name the cluster with --cluster"
        )
    max_W = limit_W or ASSUMED_J * cores * max_clock_MHz / 1e6
    power = () if limit_W else (f"max_W: {NO_LIMIT}: {ASSUMED_J:g} J x cores x 10^-12, assumed",)
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
            *power,
        ),
    )


def _watts(gpu: Gpu, quantity: str) -> float | None:
    # None if NVML does not tell it; drivers also answer 0 for that.
    return (gpu.query(None, quantity) or 0) / 1000 or None


def _limits_W(gpu: Gpu) -> tuple[float | None, float | None]:
    """Return the default power limit and the lowest allowed one; None where NVML has none."""
    low_mW, high_mW = gpu.query((0, 0), "PowerManagementLimitConstraints")
    default_W = (
        _watts(gpu, "PowerManagementDefaultLimit")
        or _watts(gpu, "EnforcedPowerLimit")
        or high_mW / 1000
        or None
    )
    return default_W, low_mW / 1000 if 0 < low_mW < high_mW else None


def _memory(gpu: Gpu, base: Device, host_bytes: int) -> tuple[int, bool, str]:
    """Return the memory of a GPU, whether it is the host's, and its source."""
    if (memory := gpu.memory_bytes) is not None:
        # A display's processes hold memory that a job does not get.
        shown = gpu.query([], "GraphicsRunningProcesses")
        held = sum(process.usedGpuMemory or 0 for process in shown)
        return memory - held, False, f"memory: NVML, of this machine's {gpu.name}"
    if base.memory_bytes and not base.shares_host_memory:
        return base.memory_bytes, False, f"memory: {NO_MEMORY}; that of device {base.name}"
    return host_bytes, True, f"memory: {NO_MEMORY}; this machine's, which the GPU shares"


def _device(gpu: Gpu, host_bytes: int) -> Device:
    """Describe a GPU; `host_bytes` is its share of the host's memory."""
    if gpu.whole:
        return _slice(gpu, _device(gpu.whole, host_bytes))
    max_MHz = gpu.query(0, "MaxClockInfo", "NVML_CLOCK_SM")
    default_MHz = gpu.query(0, "DefaultApplicationsClock", "NVML_CLOCK_SM")
    if gpu.capability >= BOOSTS_FROM:
        default_MHz = max_MHz or default_MHz
    limit_W, lowest_W = _limits_W(gpu)
    base = _matching(gpu) or _assumed(gpu, max_MHz, limit_W)
    memory_bytes, shared, source = _memory(gpu, base, host_bytes)
    return replace(
        base,
        name=base.name + gpu.variant(),  # a kind of its own: no study mixes them
        memory_bytes=memory_bytes,
        shares_host_memory=shared,
        max_W=limit_W or base.max_W,
        min_limit_W=lowest_W,
        clocks_MHz=gpu.clocks_MHz,
        default_clock_MHz=default_MHz or max_MHz or base.default_clock_MHz,
        sources=(
            source,
            f"NVML: power limits and clocks of this machine's {gpu.name}",
            *base.sources,
        ),
    )


def _slice(gpu: Gpu, whole: Device) -> Device:
    """Describe a MIG slice: its memory is NVML's, and it computes by its share of the memory.

    A share of the memory is within an eighth of the GPU of the share of its multiprocessors (MIG
    User Guide, "Supported MIG Profiles").
    """
    memory_bytes = gpu.memory_bytes or 0
    share = memory_bytes / whole.memory_bytes
    _, _, profile = gpu.name.partition(" MIG ")
    return replace(
        whole,
        name=f"{whole.name} MIG {profile}",
        memory_bytes=memory_bytes,
        peak_flops=share * whole.peak_flops,
        fp32_flops=share * whole.fp32_flops,
        fp8_flops=share * whole.fp8_flops,
        mxfp8_flops=share * whole.mxfp8_flops,
        memory_bandwidth_Bps=share * whole.memory_bandwidth_Bps,
        idle_W=share * whole.idle_W,
        max_W=share * whole.max_W,
        min_limit_W=None,
        sources=(f"{share:.0%} of its GPU, by memory", *whole.sources),
    )


def _settable(device: Device, governor: Governor) -> Device:
    """Return the device with only those clocks and limits that may be set, if any may."""
    if not governor.can_set:
        return device
    low_W, high_W = governor.limit_range_W
    return replace(
        device,
        clocks_MHz=governor.supported_clocks_MHz,
        min_limit_W=low_W if low_W < high_W else None,
    )


def _host_link_Bps(gpu: Gpu) -> float:
    if getattr(gpu.query(None, "C2cModeInfoV"), "isC2cEnabled", 0):
        return C2C_BPS
    generation = gpu.query(3, "MaxPcieLinkGeneration")
    return PCIE_LANE_BPS.get(generation, PCIE_LANE_BPS[3]) * gpu.query(16, "MaxPcieLinkWidth")


def _nvlink_Bps(gpu: Gpu) -> float:
    # All active links, each way; 0 without any.
    active = sum(gpu.query(0, "NvLinkState", link) for link in range(NVLINKS))
    return active * (NVLINK5_BPS if gpu.capability >= (10, 0) else NVLINK_BPS)


def cluster_of(gpus: tuple[Gpu, ...], memory_bytes: int, governor: Governor) -> Cluster:
    """Describe GPUs of one kind as a cluster; InputError if they are of several."""
    kinds = {gpu.name + gpu.variant() for gpu in gpus}
    if len(kinds) > 1:
        raise InputError(
            f"this machine has different GPUs ({', '.join(sorted(kinds))}); choose those of one "
            "kind with CUDA_VISIBLE_DEVICES"
        )
    host_link_Bps = _host_link_Bps(gpus[0])
    return Cluster(
        name="this-machine",
        device=_settable(_device(gpus[0], memory_bytes // len(gpus)), governor),
        devices_per_node=len(gpus),
        link_Bps=min(map(_nvlink_Bps, gpus)) or host_link_Bps,  # one may lack a bridge
        host_link_Bps=host_link_Bps,
        host_memory_bytes=memory_bytes,
        clock_control=governor.can_set,
        sources=("detected: NVML, /proc/meminfo; links from their PCIe and NVLink generation",),
    )


#: NVML's actions after which a GPU works again (nvml.h, nvmlDeviceGpuRecoveryAction_t).
_ACTIONS = {
    1: "a reset (nvidia-smi --gpu-reset)",
    2: "a reboot of the node",
    3: "its work to be drained",
    4: "its work to be drained and a reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
#: Share of the memory from which cached files are worth a note. Driver 550.54.15 does
#: not give them all up (eth-cscs/cscs-docs, pull request 216).
CACHED_SHARE = 0.05
#: States of the NVLink fabric in which CUDA does not start (nvml.h, nvmlGpuFabricState_t).
_FABRIC = {1: "not registered", 2: "still being registered"}
#: Compute modes (nvml.h, nvmlComputeMode_t).
_PROHIBITED, _EXCLUSIVE = 2, (1, 3)


def why_unusable(gpu: Gpu) -> str:
    """Return why no program can use a GPU that NVML opens, a sentence; "" if one can."""
    if action := gpu.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"):
        return f"GPU {gpu.index} ({gpu.uuid}) waits for {_ACTIONS.get(action, f'action {action}')}"
    state, _ = gpu.fabric_state() or (0, "")
    if state in _FABRIC:
        return (
            f"GPU {gpu.index} ({gpu.uuid}) is {_FABRIC[state]} with the NVLink fabric, and CUDA "
            "does not start before; start nvidia-fabricmanager (and nvidia-imex between nodes)"
        )
    if gpu.query(0, "ComputeMode") == _PROHIBITED:
        return (
            f"GPU {gpu.index} ({gpu.uuid}) takes no program (compute mode prohibited); have root "
            f"run: nvidia-smi -i {gpu.index} -c DEFAULT; or choose others with "
            "CUDA_VISIBLE_DEVICES"
        )
    return ""


def health_notes(gpu: Gpu, sys: str | Path = "/sys") -> Iterator[str]:
    """Yield warnings about a usable GPU, a sentence each."""
    cached_bytes = gpu.file_cache_bytes(sys)
    if cached_bytes > CACHED_SHARE * (gpu.memory_bytes or math.inf):
        yield (
            f"{cached_bytes / 2**30:.1f} GiB of GPU {gpu.index}'s memory hold cached files, which "
            "Linux gives up when a job needs the memory; if a job runs out of memory all the same, "
            "have root run: echo 1 > /proc/sys/vm/drop_caches"
        )
    if error := (gpu.fabric_state() or (0, ""))[1]:
        yield (
            f"the registration of GPU {gpu.index} with the NVLink fabric ended with an error "
            f"({error}): CUDA may not start, or without NVLink; restart nvidia-fabricmanager (and "
            "nvidia-imex between nodes), or reset the GPU"
        )
    if gpu.query(0, "ComputeMode") in _EXCLUSIVE:
        yield (
            f"GPU {gpu.index} takes one process at a time (compute mode exclusive): a command of "
            "which a second process uses it fails"
        )
    rows = gpu.query(None, "RemappedRows")
    if rows and rows[2]:
        yield (
            f"GPU {gpu.index} has a memory row that is remapped at its next reset, after "
            f"{rows[1]} uncorrectable errors; reset it before a study"
        )
    if gpu.smooths_power:
        yield (
            f"power smoothing is on for GPU {gpu.index}: its power falls slowly after work, so "
            "windows are longer"
        )
    limit, enforced = gpu.query(None, "PowerManagementLimit"), gpu.query(None, "EnforcedPowerLimit")
    if limit and enforced and enforced < limit:
        yield (
            f"GPU {gpu.index} is held to {enforced / 1000:g} W, below its power limit of "
            f"{limit / 1000:g} W, by its board, module or chassis"
        )


def fault_counters(gpu: Gpu) -> dict[str, int]:
    """Return the counts of damage of a GPU, by name, as far as NVML has them."""
    kind = "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"
    errors = gpu.query(None, "TotalEccErrors", kind, "NVML_VOLATILE_ECC")  # none without ECC
    cause = "NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR"
    pages = gpu.query(None, "RetiredPages", cause)
    rows = gpu.query(None, "RemappedRows")
    action = gpu.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    found = {
        "uncorrectable memory errors": errors,
        "retired pages": None if pages is None else len(pages),
        "remapped rows": rows and rows[1],
        "failed row remappings": rows and rows[3],
        "recovery actions to wait for": None if action is None else bool(action),
        "recoveries of NVLink": gpu.field("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    }
    return {name: int(count) for name, count in found.items() if count is not None}


pass

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
        return dict(self._each(lambda gpu: (gpu.uuid, fault_counters(gpu))))

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
                notes += [note for gpu in gpus for note in health_notes(gpu, self.sys)]
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
                    if why := "; ".join(filter(None, map(why_unusable, gpus))):
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
