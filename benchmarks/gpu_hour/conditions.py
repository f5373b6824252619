"""Conditions of this node's GPUs, by the numbers of the tests' conditions of fleets, and edges.

What the twin assumes of each condition is read back from the real driver; nothing is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.gpu_hour.hour import Hour, measured
from tuner.workload.node.meters.gpus import Gpu, opened_gpus, query

#: Lengths of the windows that are compared, seconds.
LENGTHS_S, REHEARSED_S = (1.5, 3.0, 6.0, 15.0), (0.5, 1.0)


def _told(answer: object) -> str:
    return "not told" if answer is None else str(answer)


def _smoothing(gpu: Gpu) -> str:
    told = gpu.field("NVML_FI_PWR_SMOOTHING_ENABLED")
    return "not supported" if told is None else "on" if told else "off"


def _module_W(gpu: Gpu) -> object:
    return query(gpu.nvml, None, lambda: gpu.field_W("NVML_POWER_SCOPE_MODULE"))


def _pending(gpu: Gpu) -> object:
    rows = gpu.query(None, "RemappedRows")
    return rows and rows[2]


def _listed_clocks(gpu: Gpu) -> object:
    memory_MHz = gpu.query(None, "SupportedMemoryClocks")
    return memory_MHz and len(gpu.query([], "SupportedGraphicsClocks", memory_MHz[0]))


def _fabric(gpu: Gpu) -> object:
    if (found := gpu.fabric_state()) is None:
        return None
    state, error = found
    return f"{state}, {error}" if error else state


#: By number in the table of conditions, what is read and how.
QUESTIONS: tuple[tuple[int, str, Callable[[Gpu], object]], ...] = (
    (4, "energy counter (mJ)", lambda gpu: gpu.query(None, "TotalEnergyConsumption")),
    (5, "power (mW)", lambda gpu: gpu.query(None, "PowerUsage")),
    (9, "instant power (W)", lambda gpu: query(gpu.nvml, None, gpu.field_W)),
    (10, "power of a module (W)", _module_W),
    (13, "power smoothing", _smoothing),
    (15, "state of the fabric", _fabric),
    (18, "MIG (now, after a reset)", lambda gpu: gpu.query(None, "MigMode")),
    (19, "memory", lambda gpu: query(gpu.nvml, None, lambda: gpu.memory_bytes)),
    (20, "power limit (mW)", lambda gpu: gpu.query(None, "PowerManagementLimit")),
    (
        22,
        "limits that may be set (mW)",
        lambda gpu: gpu.query(None, "PowerManagementLimitConstraints"),
    ),
    (22, "clocks listed", _listed_clocks),
    (26, "enforced limit (mW)", lambda gpu: gpu.query(None, "EnforcedPowerLimit")),
    (27, "persistence", lambda gpu: gpu.query(None, "PersistenceMode")),
    (31, "rows to remap at the next reset", _pending),
    (31, "recovery action", lambda gpu: gpu.field("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")),
)


def read_back() -> str:
    """Return what each visible GPU answers on each condition."""
    lines = []
    with opened_gpus() as (_, gpus):
        for gpu in gpus:
            lines.append(f"GPU {gpu.index} {gpu.name}")
            lines += [f"  {number:2} {what}: {_told(of(gpu))}" for number, what, of in QUESTIONS]
    return "\n".join(lines)


def edges(hour: Hour) -> str:
    """Compare windows of several lengths of one program: what edges add has a share of each.

    With power smoothing, repeat it (`--only edges`) with smoothing on and off.
    """
    lengths_s = REHEARSED_S if hour.rehearse else LENGTHS_S
    powers_W, flags = dict[float, float](), list[str]()
    for length_s in lengths_s:
        policy = replace(hour.window, min_s=length_s, max_s=length_s, target_se=1.0)
        found = measured(hour.probe(f"edges-{length_s:g}", window=policy))
        powers_W[length_s] = found.power_W
        flags += [flag for flag in found.flags if "fell slowly" in flag or "differ" in flag]
    longest_W = powers_W[max(lengths_s)]
    with opened_gpus() as (_, gpus):
        states = ", ".join(_smoothing(gpu) for gpu in gpus)
    shown = "; ".join(
        f"{length_s:g} s {power_W:.1f} W ({power_W / longest_W - 1:+.2%})"
        for length_s, power_W in powers_W.items()
    )
    return f"power smoothing {states}; {shown}; flags {flags}"
