"""Measurement of micro-batches in place of whole optimizer steps: plan, rule and result.

Of k micro-batches a step takes T(k) = a + k b; a occurs once (reduction, optimizer, pipeline fill).
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InvalidValue
from tuner.search_spaces.job import TrainingJob

#: Whole steps are measured as long as the smallest number of them takes no longer than this many
#: times the shortest window.
WHOLE_STEPS_WINDOWS = 2.0


@dataclass(frozen=True)
class AccumulationFit:
    """Steps of smaller accumulation from which a measurement was extrapolated; of each window one.

    A step takes `once_s` and `once_J`, and `each_s` and `each_J` for each micro-batch. `curvature`
    is the distance of the middle accumulation's time from the others' line, as a share of it.
    """

    accumulation: int
    micro_batches: tuple[float, ...]
    steps: tuple[int, ...]
    step_times_s: tuple[float, ...]
    step_energies_J: tuple[float, ...]
    once_s: float
    each_s: float
    once_J: float
    each_J: float
    curvature: float
    curvature_se: float

    @property
    def is_linear(self) -> bool:
        """True unless the departure from the line is over 2 % and over twice its error."""
        return not abs(self.curvature) > max(0.02, 2 * self.curvature_se)


@dataclass(frozen=True)
class AccumulationPlan:
    """Accumulations to measure, three below the job's `own`, or none and perhaps `why_whole`."""

    own: int = 0
    measured: tuple[int, ...] = ()
    why_whole: str = ""


def accumulation_plan(
    configuration: Configuration, job: TrainingJob, why_not_set: str = ""
) -> AccumulationPlan:
    """Return the accumulations to measure for a configuration, at most half of the job's own."""
    try:
        own = configuration.accumulation(job.at(configuration).global_batch)
    except InvalidValue:
        return AccumulationPlan()
    offloaded = configuration.get("optimizer_offload") != "none"
    # In a pipeline as many as are in flight. With the optimizer on the host two: one micro-batch
    # skips the sum that is kept there (DeepSpeed's `async_accumulate_grad_in_cpu_via_gpu`).
    unit = max(configuration.pipeline_parallel, 2 if offloaded else 1)
    if own >= 8 * unit:
        measured: tuple[int, ...] = (unit, 2 * unit, 4 * unit)
    elif unit > 1 and own >= 4 * unit:
        measured = (unit, unit + unit // 2, 2 * unit)
    else:
        return AccumulationPlan(own)
    if configuration.get("optimizer_offload") == "async":
        why_not_set = (
            "whole steps are measured: an asynchronous optimizer hides behind more micro-batches "
            "than would be measured"
        )
    if configuration.get("sharding") != "deepspeed":
        why_not_set = "whole steps are measured: the accumulation of FSDP2 is not set while it runs"
    return AccumulationPlan(own, () if why_not_set else measured, why_not_set)


def steps_take_too_long(step_time_s: float, min_steps: int, min_s: float) -> bool:
    """Return True if micro-batches are to be measured: whole steps would take two windows."""
    return min_steps * step_time_s > WHOLE_STEPS_WINDOWS * min_s
