"""Probability that a configuration meets the limits of the training job.

The cheapest of many noisy points that look feasible meets its limit by luck more often than its own
interval says. Three sources tell the probability, the best first: fresh launches, which had no part
in the choice (`of_launches`); the surrogates, whose posterior also holds what the neighbours say
(`of_surrogates`); and the interval of the point alone (`of_point`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.problem.constraints import Constraints
from tuner.results.parts import Point
from tuner.search_spaces.configuration import Configuration
from tuner.workload.measure.statistics import log_error
from tuner.workload.probe import Measurement

if TYPE_CHECKING:
    from tuner.models.surrogate.surrogates import Surrogates

__all__ = [
    "LIKELY",
    "SURE",
    "Chance",
    "Limits",
    "excess",
    "of_launches",
    "of_point",
    "of_surrogates",
]

#: Joint draws behind a probability: its standard error is at most 0.01.
DRAWS = 2500
#: From this probability on, a limit is said to be met; below one less this, not to be.
SURE = 0.9
#: Below this probability a configuration is not chosen for its limits.
LIKELY = 0.5

#: Returns the probability that a point meets each limit, and that it meets all.
Chance = Callable[[Point, Constraints], tuple[dict[str, float], float]]


def excess(point: Point, constraints: Constraints) -> dict[str, float]:
    """Return by which share the point exceeds each limit; 0 or less if it meets it."""
    found = constraints.excess(
        point.energy_to_solution_kJ,
        point.time_to_solution_s,
        point.power_W,
        peak_power_W=point.peak_power_W,
        gpus=point.configuration.world_size,
    )
    if constraints.peak_power_W is not None and "peak_power_W" not in found:
        found["peak_power_W"] = math.inf  # without samples it cannot be shown to be met
    return found


def of_point(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
    """Probability that each constraint is met, and that all are, by the point's intervals.

    Log time and log power are drawn as independent normals of the point's intervals; energy is
    their product. A peak and a number of GPUs are met or not.
    """
    normal = np.random.default_rng(0).standard_normal((2, DRAWS))
    time_se = log_error(point.time_interval_s)
    energy_se = log_error(point.energy_interval_kJ)
    power_se = math.sqrt(max(energy_se**2 - time_se**2, 0.0))
    time = math.log(point.time_to_solution_s) + time_se * normal[0]
    power = math.log(point.power_W) + power_se * normal[1]
    energy = math.log(point.energy_to_solution_kJ) + time_se * normal[0] + power_se * normal[1]
    return _met(point, constraints, time, power, energy)


def of_launches(
    point: Point,
    constraints: Constraints,
    launches: Sequence[Measurement],
    others: Sequence[Measurement],
    steps: int,
) -> tuple[dict[str, float], float]:
    """Return the same by fresh launches of the point, one window each, at least two.

    With a flat prior the mean of log time has Student's t posterior. As in `tuner.results.
    significance.compare_launches`, one spread is taken for both configurations.

    Args:
        point: what was launched; tells its peak power and number of GPUs.
        constraints: limits of the training job.
        launches: windows of the point.
        others: windows of the baseline, made in turn with them, at least one.
        steps: that make the solution.
    """
    rng = np.random.default_rng(0)
    freedom = len(launches) + len(others) - 2
    drawn = []
    for values in (
        [[math.log(m.step_time_s) for m in side] for side in (launches, others)],
        [[math.log(m.power_W) for m in side] for side in (launches, others)],
    ):
        x, y = (np.array(side) for side in values)
        squares = float(np.sum((x - x.mean()) ** 2) + np.sum((y - y.mean()) ** 2))
        error = math.sqrt(squares / freedom / x.size)
        drawn.append(float(x.mean()) + error * rng.standard_t(freedom, DRAWS))
    return _of_steps(point, constraints, drawn[0], drawn[1], steps)


def of_surrogates(surrogates: Surrogates, steps: int) -> Chance:
    """Return the function that tells the same by the posterior of fitted surrogates.

    Points that were not measured, as those of a simulated cluster, keep their own intervals.

    Args:
        surrogates: fitted to the windows of all measured points.
        steps: that make the solution.
    """

    def chance(point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
        if point.source != "measured":
            return of_point(point, constraints)
        said = surrogates.with_intervals([point.configuration])
        normal = np.random.default_rng(0).standard_normal((2, DRAWS))
        time = float(said.log_time[0]) + float(said.log_time_std[0]) * normal[0]
        power = float(said.log_power[0]) + float(said.log_power_std[0]) * normal[1]
        return _of_steps(point, constraints, time, power, steps)

    return chance


def _of_steps(
    point: Point, constraints: Constraints, log_time: np.ndarray, log_power: np.ndarray, steps: int
) -> tuple[dict[str, float], float]:
    """Return the probabilities from draws of one step's log time (s) and log power (W)."""
    time = log_time + math.log(steps)
    return _met(point, constraints, time, log_power, time + log_power - math.log(1000))


def _met(
    point: Point,
    constraints: Constraints,
    log_time: np.ndarray,
    log_power: np.ndarray,
    log_energy: np.ndarray,
) -> tuple[dict[str, float], float]:
    """Return the probabilities from joint draws of log time (s), power (W) and energy (kJ)."""
    beyond = excess(point, constraints)
    drawn = {"budget_kJ": log_energy, "deadline_s": log_time, "power_cap_W": log_power}
    met, every = {}, np.ones(DRAWS, dtype=bool)
    for name, limit in constraints.limits.items():
        if name in drawn:
            # A figure that was measured without any error may equal its limit.
            holds = drawn[name] <= math.log(limit) + 1e-12
        else:
            holds = np.full(DRAWS, beyond[name] <= 0)
        met[name] = float(holds.mean())
        every &= holds
    return met, float(every.mean())


@dataclass(frozen=True)
class Limits:
    """What a training job asks, for configurations that are launched again.

    Attributes:
        points: every measured point.
        constraints: limits and objective of the training job.
        steps: that make the solution.
    """

    points: Sequence[Point]
    constraints: Constraints
    steps: int

    def by_launches(
        self,
        configuration: Configuration,
        launches: Sequence[Measurement],
        others: Sequence[Measurement],
    ) -> float | None:
        """Return the probability that all limits are met (`of_launches`).

        None without limits, and with fewer than two launches of each.
        """
        point = next((p for p in self.points if p.configuration == configuration), None)
        if point is None or not self.constraints.limits or min(len(launches), len(others)) < 2:
            return None
        return of_launches(point, self.constraints, launches, others, self.steps)[1]

    def saves_gpus(self, configuration: Configuration, baseline: Configuration) -> bool:
        """Return whether it costs less per hour, where the least cost is asked for."""
        fewer = configuration.world_size < baseline.world_size
        return self.constraints.goal == "least-cost" and fewer
