"""Health of NVIDIA GPUs, and figures that NVML lacks, as `tuner doctor` shows them.

From the first uncorrectable memory error on, a GPU fails every program until it is reset, and NVML
counts such errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from tuner.workload.node.meters.gpus import Gpu

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


def unusable(gpu: Gpu) -> str:
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


def notes(gpu: Gpu, sys: str | Path = "/sys") -> Iterator[str]:
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
