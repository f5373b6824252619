"""Breakdown of one configuration's time, energy and memory into parts.

The time is that of the busiest stage: its parts of every micro-batch, its wait (the pipeline's
bubble), and the terms that occur once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.step import StepParts


@dataclass(frozen=True)
class Breakdown:
    """Parts of time, energy and memory that are not zero."""

    step_time_s: float
    energy_J: float
    memory_bytes: float
    host_memory_bytes: float
    clock_MHz: float
    # time_s, joules, memory: by part, largest first.
    time_s: Mapping[str, float]
    joules: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def power_W(self) -> float:
        """Average power of the whole job."""
        return self.energy_J / self.step_time_s


def largest_first(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that are not zero, largest first."""
    least = 1e-9 * sum(parts.values())  # the rounding of what adds up to nothing
    kept = ((name, value) for name, value in parts.items() if value > least)
    return dict(sorted(kept, key=lambda item: -item[1]))


def time_parts(
    parts: StepParts, constants: Constants, clocks: np.ndarray, slot: np.ndarray
) -> dict[str, float]:
    """Return the seconds of one configuration's step on the busiest stage, without the bubble."""
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
