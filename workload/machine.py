"""What this machine offers: the cluster it makes, and the facts that `tuner doctor` shows.

GPUs are asked through NVML and completed from the shipped device files; without any, every core
that this process may use (its affinity, its control group's quota) is one device. Nothing here
imports torch, deepspeed or ray: versions come from the installed packages' records, and compiled
ops from the folders they lie in.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.cluster import Cluster, Device, device_names, load_device
from search_spaces.errors import InputError
from workload.governor import NvmlGovernor
from workload.host import host_memory, usable_cores
from workload.meters import METERS, open_meter
from workload.meters.errors import MeterError
from workload.meters.gpus import Gpu, ask, open_nvml, visible_gpus

__all__ = [
    "GpuFacts",
    "MachineFacts",
    "MeterFacts",
    "detect_cluster",
    "host_memory",
    "machine_facts",
    "usable_cores",
]

PACKAGES = ("torch", "deepspeed", "transformers", "ray", "optuna", "nvidia-ml-py")
COMPILERS = ("g++", "ninja", "nvcc")

#: Dense 16-bit tensor FLOP a CUDA core and clock: times cores and top clock, about the peaks of the
#: data sheets (V100 125, A100 312, A40 150, L40S 362, H100 989, B200 2250 TFLOP/s).
TENSOR_FLOP = {(7, 0): 16, (8, 0): 32, (8, 6): 8, (8, 9): 8, (9, 0): 32, (10, 0): 64}
#: Bytes per second and lane, each way, by PCIe generation (PCI-SIG).
PCIE_LANE_BPS = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
#: Bytes per second and NVLink, each way: 25 GB/s for NVLink 2 to 4, 50 GB/s for 5 (NVIDIA).
NVLINK_BPS, NVLINK5_BPS, NVLINKS = 25e9, 50e9, 18
#: Between two ranks on one host through shared memory: a guess, as in the shipped cluster "cpu-2".
LOOPBACK_BPS = 5e9


# ---- devices


def _matching(gpu: Gpu, memory_bytes: int) -> Device | None:
    """The shipped device of this product: same model and form, memory within a tenth."""
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
    """A device nobody described, from what NVML tells and stated assumptions."""
    handle = gpu.handle
    cores = ask(nvml, 0, lambda: nvml.nvmlDeviceGetNumGpuCores(handle))
    compute = tuple(ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    memory_MHz = ask(nvml, 0, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    bus_bits = ask(nvml, 0, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    flop = TENSOR_FLOP.get(compute, 8)
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
            f"peak_flops: {cores} cores x {max_clock_MHz} MHz x {flop} FLOP, assumed",
            f"memory_bandwidth: 2 x {memory_MHz} MHz x {bus_bits} bits, assumed double data rate",
            "idle_W: 15 % of the power limit, assumed",
        ),
    )


def _device(nvml: Any, gpu: Gpu) -> Device:
    handle = gpu.handle
    memory_bytes = _memory_bytes(nvml, handle)
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
    shipped = _matching(gpu, memory_bytes)
    base = shipped or _assumed(nvml, gpu, max_MHz, default_mW / 1000)
    told = ("NVML: memory, power limits and clocks of this machine's " + gpu.name,)
    return replace(
        base,
        memory_bytes=memory_bytes,
        max_W=default_mW / 1000 or base.max_W,
        min_limit_W=limits_mW[0] / 1000 or base.min_limit_W,
        clocks_MHz=clocks_MHz or base.clocks_MHz,
        default_clock_MHz=default_MHz or max_MHz or base.default_clock_MHz,
        sources=told + base.sources,
    )


def _host_link_Bps(nvml: Any, gpu: Gpu) -> float:
    generation = ask(nvml, 3, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu.handle))
    width = ask(nvml, 16, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu.handle))
    return PCIE_LANE_BPS.get(generation, PCIE_LANE_BPS[3]) * width


def _nvlink_up(nvml: Any, handle: Any, link: int) -> int:
    return nvml.nvmlDeviceGetNvLinkState(handle, link)


def _memory_bytes(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)


def _nvlink_Bps(nvml: Any, gpu: Gpu) -> float:
    """All active NVLinks of one GPU together, each way; 0 where there are none."""
    active = sum(
        ask(nvml, 0, partial(_nvlink_up, nvml, gpu.handle, link)) for link in range(NVLINKS)
    )
    compute = ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu.handle))
    return active * (NVLINK5_BPS if compute[0] >= 10 else NVLINK_BPS)


def _gpu_cluster(nvml: Any, gpus: tuple[Gpu, ...], memory_bytes: int) -> Cluster:
    kinds = {gpu.name for gpu in gpus}
    if len(kinds) > 1:
        raise InputError(
            f"this machine has different GPUs ({', '.join(sorted(kinds))}); choose those of one "
            "kind with CUDA_VISIBLE_DEVICES"
        )
    governor = NvmlGovernor([gpu.uuid for gpu in gpus], nvml=nvml)
    governor.close()
    host_link_Bps = _host_link_Bps(nvml, gpus[0])
    return Cluster(
        name="this-machine",
        device=_device(nvml, gpus[0]),
        devices_per_node=len(gpus),
        link_Bps=_nvlink_Bps(nvml, gpus[0]) or host_link_Bps,
        host_link_Bps=host_link_Bps,
        host_memory_bytes=memory_bytes,
        clock_control=governor.can_set,
        sources=("detected: NVML, /proc/meminfo; links from their PCIe and NVLink generation",),
    )


def _cpu_cluster(cores: int, memory_bytes: int, core: str) -> Cluster:
    device = load_device(core)
    return Cluster(
        name="this-machine",
        device=replace(
            device,
            memory_bytes=memory_bytes // cores,
            sources=("memory: this machine's, shared by its usable cores", *device.sources),
        ),
        devices_per_node=cores,
        link_Bps=LOOPBACK_BPS,
        host_link_Bps=device.memory_bandwidth_Bps,
        host_memory_bytes=memory_bytes,
        sources=("detected: affinity, control group, /proc/meminfo; link_Bps: a guess",),
    )


def detect_cluster(
    *,
    nvml: Any = None,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] | None = None,
    core: str = "cpu-core",
) -> Cluster:
    """The cluster that this machine is: its visible GPUs, or its usable cores where it has none.

    Args:
        nvml: what stands in for the pynvml module.
        proc, cgroup: where the kernel's files stand.
        affinity: the cores this process may use; None asks the kernel.
        environ: where CUDA_VISIBLE_DEVICES stands, and JOULEFRONT_NVME_PATH, a folder on this
            machine's own drive for offload; the process's environment by default.
        core: the device file whose envelope and speeds a core is given (name or path).

    Raises:
        InputError: the visible GPUs are of different kinds, or cannot be used as named.
    """
    found = _detect(nvml, proc, cgroup, affinity, environ, core)
    told = (os.environ if environ is None else environ).get("JOULEFRONT_NVME_PATH", "")
    return replace(found, nvme_path=told) if told else found


def _detect(
    nvml: Any,
    proc: str | Path,
    cgroup: str | Path,
    affinity: Iterable[int] | None,
    environ: Mapping[str, str] | None,
    core: str,
) -> Cluster:
    total_bytes, _ = host_memory(proc=proc, cgroup=cgroup)
    try:
        nvml = open_nvml(nvml)
    except MeterError:
        gpus: tuple[Gpu, ...] = ()
    else:
        try:
            gpus = visible_gpus(nvml, environ=environ)
            if gpus:
                return _gpu_cluster(nvml, gpus, total_bytes)
        except (nvml.NVMLError, MeterError) as error:
            raise InputError(f"the GPUs of this machine cannot be asked: {error}") from error
        finally:
            ask(nvml, None, nvml.nvmlShutdown)
    cores = usable_cores(proc=proc, cgroup=cgroup, affinity=affinity)
    return _cpu_cluster(cores, total_bytes, core)


# ---- facts for people


@dataclass(frozen=True)
class GpuFacts:
    """One visible GPU."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class MeterFacts:
    """Whether a meter can be used here: its source where it can, the reason where not."""

    name: str
    available: bool
    note: str


@dataclass(frozen=True)
class MachineFacts:
    """What this machine offers.

    Attributes:
        host: its name.
        python: the running version.
        cores: usable ones.
        memory_bytes: what this process may use; `free_bytes` of it is free now.
        shm_bytes: size of /dev/shm, through which ranks on one host exchange; 0: there is none.
        driver: the NVIDIA driver's version, or empty.
        gpus: those visible; `gpu_note` says why there are none.
        meters: in the order of preference.
        clock_control: whether clocks may be set; `clock_note` says why not and what to run.
        compilers: path of each on PATH, or None.
        packages: version of each installed, or None.
        deepspeed_ops: op to where it stands ready: "installed" or a folder of compiled ones; an op
            that is missing is compiled when first used.
        notes: what may cost time or fail ("a killed build left a lock").
    """

    host: str
    python: str
    cores: int
    memory_bytes: int
    free_bytes: int
    shm_bytes: int
    driver: str
    gpus: tuple[GpuFacts, ...]
    gpu_note: str
    meters: tuple[MeterFacts, ...]
    clock_control: bool
    clock_note: str
    compilers: Mapping[str, str | None]
    packages: Mapping[str, str | None]
    deepspeed_ops: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, a fact a line."""
        gib = 2**30
        lines = [
            f"machine     {self.host}, Python {self.python}",
            f"cores       {self.cores} usable",
            f"memory      {self.memory_bytes / gib:.1f} GiB, {self.free_bytes / gib:.1f} GiB free; "
            f"/dev/shm {self.shm_bytes / gib:.1f} GiB",
        ]
        lines += [
            f"GPU {gpu.index:<8}{gpu.name}, {gpu.memory_bytes / gib:.1f} GiB, {gpu.uuid}"
            for gpu in self.gpus
        ]
        lines.append(f"driver      {self.driver}" if self.gpus else f"GPUs        {self.gpu_note}")
        for meter in self.meters:
            lines.append(
                f"meter       {meter.name}: {'' if meter.available else 'no: '}{meter.note}"
            )
        lines.append(f"clocks      {'may be set' if self.clock_control else self.clock_note}")
        for name, path in self.compilers.items():
            lines.append(f"compiler    {name}: {path or 'not on PATH'}")
        for name, version in self.packages.items():
            lines.append(f"package     {name} {version or 'not installed'}")
        for name, where in self.deepspeed_ops.items():
            lines.append(f"op          {name}: {where}")
        if self.packages.get("deepspeed") and not self.deepspeed_ops:
            lines.append("op          none compiled yet; each is compiled when first used")
        return lines + [f"note        {note}" for note in self.notes]


def _gpu_facts(nvml: Any) -> tuple[tuple[GpuFacts, ...], str, str]:
    """(visible GPUs, driver version, why there are none)."""
    try:
        nvml = open_nvml(nvml)
    except MeterError as error:
        return (), "", f"none: {error}"
    try:
        driver = str(ask(nvml, "", nvml.nvmlSystemGetDriverVersion))
        facts = []
        for gpu in visible_gpus(nvml):
            total = ask(nvml, 0, partial(_memory_bytes, nvml, gpu.handle))
            facts.append(GpuFacts(gpu.index, gpu.uuid, gpu.name, total))
        return tuple(facts), driver, "" if facts else "none is visible to this process"
    except (InputError, MeterError) as error:
        return (), "", f"none usable: {error}"
    finally:
        ask(nvml, None, nvml.nvmlShutdown)


def _meter_facts(
    nvml: Any, powercap: str | Path, hwmon: str | Path, core: str
) -> Iterator[MeterFacts]:
    for name in METERS:
        try:
            meter = open_meter(
                nvml=nvml, prefer=name, powercap=powercap, hwmon=hwmon, envelope=load_device(core)
            )
        except InputError as error:
            yield MeterFacts(name, False, str(error).partition("metered: ")[2] or str(error))
        else:
            meter.close()
            yield MeterFacts(name, True, meter.info.source.removeprefix(f"{name}: "))


def _clock_facts(nvml: Any) -> tuple[bool, str]:
    try:
        governor = NvmlGovernor(nvml=nvml, guard_nvml="")
    except (MeterError, InputError) as error:
        return False, f"cannot be set: {error}"
    governor.close()
    return governor.can_set, governor.why_not


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _deepspeed_ops(extensions: Path) -> tuple[dict[str, str], list[str]]:
    """(op -> where it stands ready, notes), without importing deepspeed."""
    ops: dict[str, str] = {}
    notes = []
    spec = importlib.util.find_spec("deepspeed")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        record = Path(folder) / "git_version_info_installed.py"
        found = re.search(r"^installed_ops=(\{.*\})$", _read(record), flags=re.MULTILINE)
        if found:
            installed: dict[str, bool] = ast.literal_eval(found.group(1))
            ops |= {op: "installed" for op, there in installed.items() if there}
    for built in sorted(extensions.glob("**/*.so")):
        ops.setdefault(built.stem, str(built.parent))
    for lock in sorted(extensions.glob("**/lock")):
        notes.append(
            f"{lock} is there: a build is under way, or one was killed and every later one waits "
            "for it for ever; if none runs, remove the file"
        )
    return dict(sorted(ops.items())), notes


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def machine_facts(
    *,
    nvml: Any = None,
    proc: str | Path = "/proc",
    cgroup: str | Path = "/sys/fs/cgroup",
    powercap: str | Path = "/sys/class/powercap",
    hwmon: str | Path = "/sys/class/hwmon",
    extensions: str | Path | None = None,
    core: str = "cpu-core",
    which: Callable[[str], str | None] = shutil.which,
) -> MachineFacts:
    """What this machine offers, found without changing anything or importing a framework.

    Args:
        nvml: what stands in for the pynvml module.
        proc, cgroup, powercap, hwmon: where the kernel's files stand.
        extensions: where compiled DeepSpeed ops are kept; None takes `workload.ranks`'s folder.
        core: the device file of the estimate's envelope.
        which: finds a command on PATH.
    """
    from workload.ranks import extensions_dir

    total_bytes, free_bytes = host_memory(proc=proc, cgroup=cgroup)
    gpus, driver, gpu_note = _gpu_facts(nvml)
    clock_control, clock_note = _clock_facts(nvml)
    ops, notes = _deepspeed_ops(Path(extensions_dir() if extensions is None else extensions))
    compilers = {name: which(name) for name in COMPILERS if name != "nvcc" or gpus}
    if compilers["g++"] is None or compilers["ninja"] is None:
        notes.append("DeepSpeed compiles ops with g++ and ninja: put both on PATH")
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return MachineFacts(
        host=platform.node(),
        python=platform.python_version(),
        cores=usable_cores(proc=proc, cgroup=cgroup),
        memory_bytes=total_bytes,
        free_bytes=free_bytes,
        shm_bytes=shm_bytes,
        driver=driver,
        gpus=gpus,
        gpu_note=gpu_note,
        meters=tuple(_meter_facts(nvml, powercap, hwmon, core)),
        clock_control=clock_control,
        clock_note=clock_note,
        compilers=compilers,
        packages={name: _package(name) for name in PACKAGES},
        deepspeed_ops=ops,
        notes=tuple(notes),
    )
