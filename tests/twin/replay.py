"""A twin node that answers as a recorded one did (`benchmarks.gpu_hour.nvml_recording`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_hour.nvml_recording import COLUMNS, NvmlRecording
from tests.twin import layout
from tests.twin.gpu import TwinGpu
from tests.twin.node import TwinNode

#: The call that a column is read by, as errors are counted in a recording.
_CALLS = {
    "energy_mJ": "nvmlDeviceGetTotalEnergyConsumption",
    "instant_mW": "power.instant",
    "averaged_mW": "nvmlDeviceGetPowerUsage",
    "module_mW": "power.module",
    "sm_MHz": "nvmlDeviceGetClockInfo",
    "memory_MHz": "nvmlDeviceGetClockInfo",
    "temperature_C": "nvmlDeviceGetTemperature",
    "utilisation": "nvmlDeviceGetUtilizationRates",
    "reasons": "nvmlDeviceGetCurrentClocksEventReasons",
    "limit_mW": "nvmlDeviceGetPowerManagementLimit",
}
#: What a function is called by where errors are injected, if not by its own name.
_SUFFIXES = (".SM", ".MEM", ".bytes", ".bus", ".v2", ".active")
NOT_SUPPORTED = 3


def _known(answer: Any, default: Any) -> Any:
    return default if isinstance(answer, dict) and "error" in answer else answer


def gpus_of(recording: NvmlRecording) -> list[TwinGpu]:
    """Return the recorded GPUs; what was not told is as in an A100."""
    return [_gpu(device) for device in recording.devices]


def _gpu(told: Mapping[str, Any]) -> TwinGpu:
    plain = TwinGpu()

    def get(name: str, default: Any) -> Any:
        return _known(told.get(name, default), default)

    memory = get("nvmlDeviceGetMemoryInfo", {"total": plain.memory_bytes, "used": 0})
    split = get("nvmlDeviceGetMemoryInfo.v2", {"reserved": 0, "used": memory["used"]})
    low_mW, high_mW = get("nvmlDeviceGetPowerManagementLimitConstraints", (0, 1_000_000))
    default_mW = get("nvmlDeviceGetPowerManagementDefaultLimit", high_mW)
    clocks = get("nvmlDeviceGetSupportedGraphicsClocks", plain.clock_MHz)
    memory_clocks = get("nvmlDeviceGetSupportedMemoryClocks", plain.memory_MHz)
    c2c = get("nvmlDeviceGetC2cModeInfoV", {"isC2cEnabled": 0})
    return TwinGpu(
        name=get("nvmlDeviceGetName", plain.name),
        uuid=get("nvmlDeviceGetUUID", ""),
        memory_bytes=memory["total"],
        reserved_bytes=split["reserved"],
        used_bytes=split["used"],
        pci_bus=get("nvmlDeviceGetPciInfo.bus", 0),
        cores=get("nvmlDeviceGetNumGpuCores", 0),
        bus_bits=get("nvmlDeviceGetMemoryBusWidth", 0),
        compute=tuple(get("nvmlDeviceGetCudaComputeCapability", plain.compute)),
        pcie_generation=get("nvmlDeviceGetMaxPcieLinkGeneration", 0),
        pcie_width=get("nvmlDeviceGetMaxPcieLinkWidth", 0),
        nvlinks=get("nvmlDeviceGetNvLinkState.active", 0),
        c2c=bool(c2c["isC2cEnabled"] if isinstance(c2c, dict) else c2c),
        mig=-get("nvmlDeviceGetMigMode", (0, 0))[0],
        clock_MHz=tuple(sorted(clocks))[-layout.MAX_CLOCKS :],
        memory_MHz=tuple(sorted(memory_clocks))[-layout.MAX_MEMORY_CLOCKS :],
        default_application_MHz=get("nvmlDeviceGetDefaultApplicationsClock.SM", 0),
        limit_W=get("nvmlDeviceGetPowerManagementLimit", default_mW) / 1000,
        default_limit_W=default_mW / 1000,
        min_limit_W=low_mW / 1000,
        max_limit_W=high_mW / 1000,
    )


def replayed_node(path: Path, file: Path, **options: Any) -> TwinNode:
    """Return a node that answers with the GPUs, readings and errors of a recording."""
    recording = NvmlRecording.read(file)
    told = {
        "driver_version": _known(recording.system["nvmlSystemGetDriverVersion"], "unknown"),
        "cuda_driver": _known(recording.system["nvmlSystemGetCudaDriverVersion_v2"], 0),
        "root": recording.root,
    }
    node = TwinNode(path, gpus_of(recording), **{**told, **options})
    for index, (told, rows) in enumerate(zip(recording.devices, recording.rows, strict=True)):
        codes = [_code(recording.errors, index, _CALLS[column]) for column in COLUMNS]
        node.play(index, [[math.nan if x is None else x for x in row] for row in rows], codes)
        for name, answer in told.items():
            if isinstance(answer, dict) and answer.get("error"):
                for suffix in _SUFFIXES:
                    name = name.removesuffix(suffix)
                node.fail(name, answer["error"], gpu=index)
    return node


def _code(errors: Mapping[str, int], gpu: int, call: str) -> int:
    """Return the most frequent error of a call."""
    found: Counter[int] = Counter()
    for key, count in errors.items():
        of, name, code = key.split()
        if (int(of), name) == (gpu, call) and code != "None":
            found[int(code)] += count
    return found.most_common(1)[0][0] if found else NOT_SUPPORTED
