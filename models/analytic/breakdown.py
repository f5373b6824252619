"""Breakdown of one configuration's time, energy and memory into parts.

The time is that of the busiest stage: its parts of every micro-batch, its wait (the pipeline's
bubble), and the terms that occur once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.memory import DEVICE_PARTS, MemoryParts
from tuner.models.analytic.stages import Stages
from tuner.models.analytic.step import StepParts


@dataclass(frozen=True)
class Breakdown:
    """Parts of time, energy and memory that are not zero.

    Attributes:
        time_s, joules, memory: by part, largest first.
    """

    step_time_s: float
    energy_J: float
    memory_bytes: float
    host_memory_bytes: float
    clock_MHz: float
    time_s: Mapping[str, float]
    joules: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def power_W(self) -> float:
        """Average power of the whole job."""
        return self.energy_J / self.step_time_s


def _sorted(parts: Mapping[str, float]) -> dict[str, float]:
    least = 1e-9 * sum(parts.values())  # the rounding of what adds up to nothing
    kept = ((name, value) for name, value in parts.items() if value > least)
    return dict(sorted(kept, key=lambda item: -item[1]))


def break_down(
    *,
    parts: StepParts,
    stages: Stages,
    constants: Constants,
    clocks: np.ndarray,
    slot: np.ndarray,
    step_time_s: float,
    joules: Mapping[str, float],
    memory: MemoryParts,
    clock_MHz: float,
) -> Breakdown:
    """Return one configuration's breakdown from its parts (all arrays have one row)."""
    time = _time_parts(parts, constants, clocks, slot)
    time["pipeline bubble"] = max(0.0, step_time_s - sum(time.values()))
    fullest = int(memory.device[0].argmax())
    bytes_of = {name: float(getattr(memory, name)[0, fullest]) for name in DEVICE_PARTS}
    return Breakdown(
        step_time_s=step_time_s,
        energy_J=sum(joules.values()),
        memory_bytes=float(memory.device[0].max()),
        host_memory_bytes=float(memory.host[0].max()),
        clock_MHz=clock_MHz,
        time_s=_sorted(time),
        joules=_sorted(joules),
        memory=_sorted(bytes_of),
    )


def _time_parts(
    parts: StepParts, constants: Constants, clocks: np.ndarray, slot: np.ndarray
) -> dict[str, float]:
    busiest = int(slot[0].argmax())
    m = float(parts.m[0, 0])

    def of(values: np.ndarray) -> float:
        return float(values[0, busiest])

    device = of(parts.device_s(clocks, constants))
    arithmetic = of(parts.arithmetic / clocks)
    once = {
        "gradients and ZeRO": float(parts.sync_s(slot, constants)[0, busiest]),
        "optimizer": of(parts.update),
        "optimizer offload": float(parts.offload_s(slot)[0, busiest]),
        "loop": constants.step_s,
    }
    return {
        "arithmetic": m * min(arithmetic, device),
        "memory traffic": m * max(0.0, device - arithmetic),
        "dispatch": m * of(parts.dispatch_s(clocks, constants)),
        "tensor-parallel links": m * of(parts.tensor),
        "sequence links": m * of(parts.sequence),
        "expert all-to-all": m * of(parts.experts),
        "stage transfer": m * of(parts.transfer),
        "activation offload": m * of(parts.host_s(clocks, constants)),
        **once,
    }
