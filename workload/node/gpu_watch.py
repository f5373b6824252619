"""Watch of a node's GPUs during one probe: damage that NVML counts, and processes of others.

From the first uncorrectable memory error on, a GPU fails every program until it is reset. CUDA then
reports errors that programs cause, too ("illegal memory access"), so that its sentence alone would
blame the configuration: a probe that fails while a counter moves has failed by the node.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.measure.window import ProbeFailed
from tuner.workload.meters.errors import MeterError
from tuner.workload.meters.gpus import Gpu, ask, open_nvml, visible_gpus
from tuner.workload.node.preflight import busy_gpus
from tuner.workload.probe import Failure

#: Numbers of faults by UUID of the GPU and name, as a sentence calls them.
Counters = Mapping[str, Mapping[str, int]]


def _of_gpu(nvml: Any, gpu: Gpu) -> dict[str, int]:
    """Return the counters that this GPU has: those that it tells now, none without ECC."""

    def asked(call: str, *kind: int) -> Any:
        return ask(nvml, None, lambda: getattr(nvml, call)(gpu.handle, *kind))

    uncorrected, double_bit = (
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    errors = asked("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC)
    pages = asked("nvmlDeviceGetRetiredPages", double_bit)
    rows = asked("nvmlDeviceGetRemappedRows")
    found = {
        "uncorrectable memory errors": errors,
        "retired pages": None if pages is None else len(pages),
        "remapped rows": rows and rows[1],
        "failed row remappings": rows and rows[3],
    }
    return {name: int(count) for name, count in found.items() if count is not None}


def fault_counters(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> Counters:
    """Return the fault counters of each visible GPU, by UUID; empty if GPUs cannot be asked."""
    try:
        opened = open_nvml(nvml)
    except MeterError:
        return {}
    try:
        return {gpu.uuid: _of_gpu(opened, gpu) for gpu in visible_gpus(opened, environ=environ)}
    except (InputError, MeterError):
        return {}
    finally:
        ask(opened, None, opened.nvmlShutdown)


def new_faults(before: Counters, after: Counters) -> str:
    """Return what has happened to GPUs between two answers of `fault_counters`, or ""."""
    found = []
    for uuid, counters in before.items():
        if uuid not in after:
            found.append(f"{uuid} cannot be used any more")
            continue
        for name, count in after[uuid].items():
            if (more := count - counters.get(name, count)) > 0:  # not told before: not new
                found.append(f"{uuid} has {more} more {name}")
    return "; ".join(found)


class GpuWatch:
    """Watch of the visible GPUs from construction on; one of a cluster of cores says nothing."""

    def __init__(self, on_gpus: bool) -> None:
        self._on_gpus = on_gpus
        self._before = fault_counters() if on_gpus else {}

    def require_free(self) -> None:
        """Check that no other process uses a GPU.

        Raises:
            ProbeFailed: one does, or the GPUs cannot be asked: the node's failure.
        """
        try:
            busy = "; ".join(busy_gpus()) if self._on_gpus else ""
        except (InputError, MeterError) as error:
            busy = str(error)
        if busy:
            raise ProbeFailed(Failure("node", busy))

    def others(self, own: Collection[int]) -> str:
        """Return a note for a window in which other processes used a GPU, else "".

        Args:
            own: the ranks and all that they started.
        """
        if not self._on_gpus:
            return ""
        try:
            busy = "; ".join(busy_gpus(own={*own, os.getpid()}))
        except (InputError, MeterError):  # the meter reports it
            busy = ""
        return busy and f"at the end of the window, {busy}"

    def cause(self, failure: Failure) -> Failure:
        """Return the failure, as one of the node if a GPU was damaged meanwhile."""
        if not self._before or failure.kind not in ("crash", "hang", "time_limit"):
            return failure
        found = new_faults(self._before, fault_counters())
        return Failure("node", f"{found}: {failure.message}") if found else failure
