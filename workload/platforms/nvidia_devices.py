"""Description of NVIDIA GPUs as a cluster, from NVML and the shipped device files."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import partial
from typing import Any

from tuner.search_spaces.cluster import Cluster, Device, device_names, load_device
from tuner.search_spaces.errors import InputError
from tuner.workload.meters.gpus import Gpu, ask

#: Dense 16-bit tensor FLOP a CUDA core and clock: times cores and top clock, about the peaks of the
#: data sheets (V100 125, T4 65, A100 312, A40 150, L40S 362, H100 989, B200 2250, RTX PRO 6000 504
#: TFLOP/s). B300, whose sheet says 2250 to 2500, is taken as B200.
TENSOR_FLOP = {
    (7, 0): 16,
    (7, 5): 16,
    (8, 0): 32,
    (8, 6): 8,
    (8, 9): 8,
    (9, 0): 32,
    (10, 0): 64,
    (10, 3): 64,
    (12, 0): 8,
}
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


def _power_profile(nvml: Any, gpu: Gpu) -> str:
    """Return the power profiles in force (Blackwell), which lower clocks: " (MAX_Q)", or ""."""

    def asked() -> list[int]:
        told = nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        nvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(gpu.handle, ctypes.byref(told))
        words = told.enforcedProfilesMask.mask
        return [bit for bit in range(32 * len(words)) if words[bit // 32] >> bit % 32 & 1]

    prefix = "NVML_POWER_PROFILE_"
    listed = [name for name in dir(nvml) if name.startswith(prefix) and "OPERATION" not in name]
    names = {getattr(nvml, name): name for name in listed}
    found = [names.get(bit, str(bit)).removeprefix(prefix) for bit in ask(nvml, [], asked)]
    return f" ({', '.join(found)})" if found else ""


def _matching(gpu: Gpu, memory_bytes: int) -> Device | None:
    """Return the shipped device of this product: same model and form, memory within a tenth."""
    words = re.split(r"[ -]", gpu.name.upper())
    for name in sorted(device_names(), key=len):
        parts = name.upper().split("-")
        if parts[0] not in words or ("PCIE" in words) != ("PCIE" in parts):
            continue
        device = load_device(name)
        if device.type == "cuda" and abs(device.memory_bytes / memory_bytes - 1) < 0.1:
            return device
    return None


def _assumed(nvml: Any, gpu: Gpu, max_clock_MHz: int, max_W: float) -> Device:
    """Describe an unknown device from NVML and stated assumptions."""
    handle = gpu.handle
    cores = ask(nvml, 0, lambda: nvml.nvmlDeviceGetNumGpuCores(handle))
    compute = tuple(ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    memory_MHz = ask(nvml, 0, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    bus_bits = ask(nvml, 0, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    flop = TENSOR_FLOP.get(compute, 8) * (GEFORCE_RATE if "GEFORCE" in gpu.name.upper() else 1)
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


def _device(nvml: Any, gpu: Gpu) -> Device:
    handle = gpu.handle
    memory_bytes = gpu_memory_bytes(nvml, handle)
    max_MHz = ask(nvml, 0, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    default_mW = ask(nvml, 0, lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
    limits_mW = ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))

    def listed() -> tuple[int, ...]:
        memory_MHz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
        return tuple(sorted(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_MHz)))

    clocks_MHz = ask(nvml, (), listed)
    default_MHz = ask(
        nvml, 0, lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_SM)
    )
    compute = tuple(ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    if compute >= BOOSTS_FROM:
        default_MHz = max_MHz or default_MHz
    shipped = _matching(gpu, memory_bytes)
    base = shipped or _assumed(nvml, gpu, max_MHz, default_mW / 1000)
    told = ("NVML: memory, power limits and clocks of this machine's " + gpu.name,)
    return replace(
        base,
        name=base.name + _power_profile(nvml, gpu),  # a kind of its own: no study mixes them
        memory_bytes=memory_bytes - _display_bytes(nvml, handle),
        max_W=default_mW / 1000 or base.max_W,
        min_limit_W=limits_mW[0] / 1000 or base.min_limit_W,
        clocks_MHz=clocks_MHz or base.clocks_MHz,
        default_clock_MHz=default_MHz or max_MHz or base.default_clock_MHz,
        sources=told + base.sources,
    )


def _host_link_Bps(nvml: Any, gpu: Gpu) -> float:
    if ask(nvml, 0, lambda: nvml.nvmlDeviceGetC2cModeInfoV(gpu.handle).isC2cEnabled):
        return C2C_BPS
    generation = ask(nvml, 3, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu.handle))
    width = ask(nvml, 16, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu.handle))
    return PCIE_LANE_BPS.get(generation, PCIE_LANE_BPS[3]) * width


def _nvlink_up(nvml: Any, handle: Any, link: int) -> int:
    return nvml.nvmlDeviceGetNvLinkState(handle, link)


def gpu_memory_bytes(nvml: Any, handle: Any) -> int:
    """Return a GPU's memory, bytes."""
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


def _display_bytes(nvml: Any, handle: Any) -> int:
    """Return the memory of the processes that draw a display, which a job does not get, bytes."""
    shown = ask(nvml, [], lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
    return sum(process.usedGpuMemory or 0 for process in shown)


def _nvlink_Bps(nvml: Any, gpu: Gpu) -> float:
    """Return the speed of all active NVLinks of one GPU, each way; 0 without any."""
    active = sum(
        ask(nvml, 0, partial(_nvlink_up, nvml, gpu.handle, link)) for link in range(NVLINKS)
    )
    compute = ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu.handle))
    return active * (NVLINK5_BPS if compute[0] >= 10 else NVLINK_BPS)


def cluster_of_gpus(
    nvml: Any, gpus: tuple[Gpu, ...], memory_bytes: int, clock_control: bool
) -> Cluster:
    """Describe the GPUs of this node; InputError if they differ, or are of an unknown kind."""
    kinds = {gpu.name + _power_profile(nvml, gpu) for gpu in gpus}
    if len(kinds) > 1:
        raise InputError(
            f"this machine has different GPUs ({', '.join(sorted(kinds))}); choose those of one "
            "kind with CUDA_VISIBLE_DEVICES"
        )
    host_link_Bps = _host_link_Bps(nvml, gpus[0])
    return Cluster(
        name="this-machine",
        device=_device(nvml, gpus[0]),
        devices_per_node=len(gpus),
        link_Bps=_nvlink_Bps(nvml, gpus[0]) or host_link_Bps,
        host_link_Bps=host_link_Bps,
        host_memory_bytes=memory_bytes,
        clock_control=clock_control,
        sources=("detected: NVML, /proc/meminfo; links from their PCIe and NVLink generation",),
    )
