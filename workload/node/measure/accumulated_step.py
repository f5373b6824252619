"""The step of the job's own accumulation, from windows of steps of few micro-batches.

Time and energy of a step are lines in the number of micro-batches, fitted by weighted least squares
over the windows of one launch, or proportional to that number where the fitted line would fall.
What the launch adds to all windows alike (its random effect) is common to them and therefore to the
result, and is accounted for between launches as for whole steps. Errors include the extrapolation:
they are those of the fitted line at the job's own accumulation (Draper and Smith 1998, Applied
Regression Analysis, section 1.4), widened by the residuals and, for few steps, by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from tuner.workload.node.measure.statistics import Z90, Reached, StepEstimate, Window, ahead_of
from tuner.workload.node.measure.window import Conductor
from tuner.workload.node.meters.base import Meter, Reading
from tuner.workload.records.accumulation import (
    AccumulationFit,
    AccumulationPlan,
    steps_take_too_long,
)
from tuner.workload.records.power_sample import PowerSample
from tuner.workload.records.probe import WindowPolicy

#: Share of the shortest window that each accumulation gets, in ascending order: the largest one
#: tells most about the slope, the middle one only if it is one.
SHARES = (0.25, 0.15, 0.6)
#: Least number of steps of each.
LEAST_STEPS = 2
#: Degrees of freedom of the pooled spread of steps in the spread of a single window.
SHRINKAGE = 4.0
#: Relative spread of a step if no window has two of them.
ASSUMED_SPREAD = 0.02
#: Least relative error of a window's power: drift and the resolution of power readings.
POWER_FLOOR = 0.002


@dataclass(frozen=True)
class AccumulationPoint:
    """One window of steps of equal accumulation; relative errors are NaN if unknown."""

    micro_batches: float
    steps: int
    step_time_s: float
    step_time_rse: float
    power_W: float
    power_rse: float = math.nan


def choose_accumulation(
    conductor: Conductor, plan: AccumulationPlan, policy: WindowPolicy
) -> AccumulationPlan:
    """Decide whether to measure micro-batches, by a step of the largest accumulation.

    The ranks have done their first step with the smallest one.
    """
    if not plan.measured:
        return plan
    if conductor.micro_batches != plan.measured[0]:
        conductor.set_accumulation(plan.own)  # where it was set after all
        return AccumulationPlan(
            plan.own,
            why_whole="whole steps are measured: the program decides on its accumulation",
        )
    largest = plan.measured[-1]
    conductor.set_accumulation(largest)
    whole_s = sum(conductor.run(1)) * plan.own / largest
    if steps_take_too_long(whole_s, policy.min_steps, policy.min_s):
        conductor.set_accumulation(plan.measured[0])
        return plan
    conductor.set_accumulation(plan.own)
    return replace(plan, measured=())


def measure_accumulated(
    conductor: Conductor,
    meter: Meter,
    policy: WindowPolicy,
    accumulations: Sequence[int],
    own: int,
    *,
    micro_batch_s: float,
    samples: Callable[[], Sequence[PowerSample]] = tuple,
    competitors: Sequence[Reached] = (),
) -> Window:
    """Measure steps of the accumulations in turn until the extrapolated step is known well enough.

    The ranks are left at the smallest accumulation. The policy's lengths hold for all windows
    together, its target for the extrapolated step; one beaten by a known one is measured once.
    """
    parts: list[Window] = []
    points: list[AccumulationPoint] = []
    order = list(zip(SHARES, accumulations, strict=True))
    while True:
        for share, each in order:
            conductor.set_accumulation(each)
            least_s = share * policy.min_s
            short = replace(policy, min_s=least_s, max_s=least_s, min_steps=LEAST_STEPS)
            before = conductor.micro_batches
            part = conductor.measure(meter, short, each * micro_batch_s, samples=samples)
            parts.append(part)
            points.append(_point(part, conductor.micro_batches - before))
        order.reverse()  # there and back, so that what drifts does not look like a slope
        estimate = fit_accumulation(points, own)
        time_rse = estimate.step_time_se_s / estimate.step_time_s
        power_rse = estimate.power_se_W / estimate.power_W
        length_s = math.fsum(part.length_s for part in parts)
        if max(time_rse, power_rse) <= policy.target_se:
            beaten_by = None
            break
        # By the lower ends of the 90 % intervals, whose errors are Student's already.
        low_s = estimate.step_time_s * math.exp(-Z90 * time_rse)
        low_J = estimate.step_time_s * estimate.power_W
        low_J *= math.exp(-Z90 * math.hypot(time_rse, power_rse))
        beaten_by = ahead_of(low_s, low_J, competitors)
        if length_s >= policy.max_s or beaten_by:
            break
    conductor.set_accumulation(accumulations[0])
    opened = parts[0].opened
    energy_J = math.fsum(part.energy_J for part in parts)
    return Window(
        opened,
        Reading(opened.time_s + length_s, opened.energy_J + energy_J),
        tuple(time for part in parts for time in part.step_times_s),
        samples=tuple(sample for part in parts for sample in part.samples),
        phases_s=_phases(parts, estimate.weights),
        beaten_by=beaten_by,
        parts=tuple(parts),
        estimate=estimate,
        marks=tuple(mark for part in parts for mark in part.marks),
    )


def _point(window: Window, micro_batches: int) -> AccumulationPoint:
    """Return the point of a window in which the ranks did this number of micro-batches."""
    steps = len(window.step_times_s)
    return AccumulationPoint(
        micro_batches=micro_batches / steps,
        steps=steps,
        step_time_s=window.step_time_s,
        step_time_rse=window.step_time_se_s / window.step_time_s,
        power_W=window.power_W,
        power_rse=window.power_se_W / window.power_W,
    )


def _phases(parts: Sequence[Window], weights: Sequence[float]) -> Mapping[str, float]:
    """Return the seconds of the whole step in each phase, which are lines as the step's are."""
    names = dict.fromkeys(name for part in parts for name in part.phases_s)
    each = list(zip(weights, parts, strict=True))
    return {
        name: max(0.0, math.fsum(w * p.phases_s.get(name, 0.0) for w, p in each)) for name in names
    }


def fit_accumulation(points: Sequence[AccumulationPoint], own: int) -> StepEstimate:
    """Fit time and energy; return the step of `own` micro-batches, or raise ValueError."""
    k = np.array([p.micro_batches for p in points], dtype=float)
    if np.ptp(k) == 0:
        raise ValueError("a line needs windows of two accumulations")
    n = np.array([p.steps for p in points], dtype=float)
    time = np.array([p.step_time_s for p in points])
    power = np.array([p.power_W for p in points])
    joules = power * time
    time_se = _time_errors(points, n, time)
    power_se = power * _power_errors(points)
    design = np.column_stack([np.ones_like(k), k])
    solve = _line(design, time_se)
    if min((solve @ time)[1], (solve @ joules)[1]) <= 0:
        # No step gets shorter by a further micro-batch: on a busy machine the windows say nothing
        # of what a step costs once. Their residuals then widen the error.
        solve = np.vstack([np.zeros_like(k), _line(k[:, None], time_se)])
    once_s, each_s = solve @ time
    once_J, each_J = solve @ joules
    weights = np.array([1.0, own]) @ solve
    step_s, step_J = float(weights @ time), float(weights @ joules)
    step_W = step_J / step_s
    free = len(points) - 2
    time_wider = _wider((time - design @ (solve @ time)) / time_se, free)
    joules_se = np.hypot(power_se * time, power * time_se)
    power_wider = _wider((joules - design @ (solve @ joules)) / joules_se, free)
    # It makes a normal 90 % interval one of Student's t.
    few = float(stdtrit(max(float((n - 1).sum()) + free, 1.0), 0.95)) / Z90
    # Errors of time and power of the windows are independent; both move the power of the step.
    by_power, by_time = weights * time * power_se, weights * (power - step_W) * time_se
    curvature, curvature_se = _curvature(k, time, time_se)
    return StepEstimate(
        fit=AccumulationFit(
            accumulation=own,
            micro_batches=tuple(map(float, k)),
            steps=tuple(p.steps for p in points),
            step_times_s=tuple(map(float, time)),
            step_energies_J=tuple(map(float, joules)),
            once_s=float(once_s),
            each_s=float(each_s),
            once_J=float(once_J),
            each_J=float(each_J),
            curvature=curvature,
            curvature_se=curvature_se,
        ),
        step_time_s=step_s,
        step_time_se_s=few * time_wider * float(np.linalg.norm(weights * time_se)),
        power_W=step_W,
        power_se_W=few * power_wider * float(np.linalg.norm([by_power, by_time])) / step_s,
        weights=tuple(map(float, weights)),
    )


def _line(design: np.ndarray, se: np.ndarray) -> np.ndarray:
    # The matrix (terms, windows) that takes the windows' values to the fitted terms.
    weighted = design / se[:, None] ** 2
    return np.asarray(np.linalg.solve(weighted.T @ design, weighted.T))


def _time_errors(
    points: Sequence[AccumulationPoint], n: np.ndarray, time: np.ndarray
) -> np.ndarray:
    """Return the standard error of each window's step time, drawn to the pooled spread."""
    rse = np.array([p.step_time_rse for p in points])
    free = np.where(np.isnan(rse), 0.0, n - 1)
    squares = np.where(np.isnan(rse), 0.0, rse**2 * n)
    pooled = float(free @ squares / free.sum()) if free.sum() else ASSUMED_SPREAD**2
    own = (free * squares + SHRINKAGE * pooled) / (free + SHRINKAGE)
    return np.asarray(time * np.sqrt(np.maximum(own / n, 1e-12)))


def _power_errors(points: Sequence[AccumulationPoint]) -> np.ndarray:
    """Return the relative standard error of each window's power."""
    competitors = [p.power_rse for p in points if not math.isnan(p.power_rse)]
    usual = max(competitors, default=POWER_FLOOR)
    errors = np.array([usual if math.isnan(p.power_rse) else p.power_rse for p in points])
    return np.asarray(np.maximum(errors, POWER_FLOOR))


def _wider(residuals: np.ndarray, free: int) -> float:
    """Return the factor by which the residuals exceed their errors; at least 1."""
    return max(1.0, math.sqrt(float(residuals @ residuals) / free)) if free else 1.0


def _curvature(k: np.ndarray, time: np.ndarray, se: np.ndarray) -> tuple[float, float]:
    """Return the relative distance of the middle from the line through the ends, and its error."""
    levels = np.unique(k)
    if len(levels) < 3:
        return math.nan, math.nan
    low, high = levels[0], levels[-1]
    means, errors = [], []
    for here in (k == low, (k > low) & (k < high), k == high):
        weights = 1 / se[here] ** 2
        means.append(float(weights @ time[here] / weights.sum()))
        errors.append(1 / math.sqrt(weights.sum()))
    inside = (k > low) & (k < high)
    share = (float(k[inside].mean()) - low) / (high - low)
    line = (1 - share) * means[0] + share * means[2]
    error = math.hypot((1 - share) * errors[0], errors[1], share * errors[2])
    return float((means[1] - line) / line), float(error / line)
