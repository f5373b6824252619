"""The cluster of a machine's NVIDIA GPUs, by NVML and device files.

What NVML does not tell is taken from the shipped device of the same product, else assumed, and the
device's sources say so: laptops' GPUs tell no power limit, and a GPU that computes in the host's
memory (GB10) tells no memory.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.search_spaces.cluster import Cluster, Device, load_device
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.node_names import devices_called
from tuner.workload.node.clocks.base import Governor
from tuner.workload.node.meters.gpus import Gpu

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
