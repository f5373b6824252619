"""Windows of steps of few micro-batches, and the step of the job's own accumulation from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tuner.workload.accumulation import AccumulationFit
from tuner.workload.measure.accumulation_fit import (
    AccumulationPoint,
    StepEstimate,
    fit_accumulation,
)
from tuner.workload.measure.statistics import Z90, Window
from tuner.workload.measure.window import Conductor
from tuner.workload.measure.window_end import Reached, ahead_of
from tuner.workload.meters.base import Meter, PowerSample, Reading
from tuner.workload.probe import WindowPolicy

#: Share of the shortest window that each accumulation gets, in ascending order: the largest one
#: tells most about the slope, the middle one only if it is one.
SHARES = (0.25, 0.15, 0.6)
#: Least number of steps of each.
LEAST_STEPS = 2


@dataclass(frozen=True)
class AccumulatedWindow(Window):
    """Several windows of one live setting; only step time and power are of the estimated step."""

    parts: tuple[Window, ...] = ()
    estimate: StepEstimate | None = field(default=None)

    @classmethod
    def of(cls, parts: Sequence[Window], estimate: StepEstimate) -> AccumulatedWindow:
        """Join the parts."""
        first = parts[0].opened
        length_s = math.fsum(part.length_s for part in parts)
        energy_J = math.fsum(part.energy_J for part in parts)
        return cls(
            first,
            Reading(first.time_s + length_s, first.energy_J + energy_J),
            tuple(time for part in parts for time in part.step_times_s),
            samples=tuple(sample for part in parts for sample in part.samples),
            phases_s=_phases(parts, estimate.weights),
            parts=tuple(parts),
            estimate=estimate,
        )

    @property
    def _estimate(self) -> StepEstimate:
        assert self.estimate is not None
        return self.estimate

    @property
    def fit(self) -> AccumulationFit:
        """The lines, and what they were fitted to."""
        return self._estimate.fit

    @property
    def step_time_s(self) -> float:
        return self._estimate.step_time_s

    @property
    def step_time_se_s(self) -> float:
        return self._estimate.step_time_se_s

    @property
    def power_W(self) -> float:
        return self._estimate.power_W

    @property
    def power_blocks_W(self) -> tuple[float, ...]:
        return ()  # their mean would be that of short steps

    @property
    def power_se_W(self) -> float:
        return self._estimate.power_se_W

    @property
    def sampled_energy_J(self) -> float:
        return math.fsum(part.sampled_energy_J for part in self.parts)


def measure_accumulated(
    conductor: Conductor,
    meter: Meter,
    policy: WindowPolicy,
    accumulations: Sequence[int],
    own: int,
    *,
    micro_batch_s: float,
    samples: Callable[[], Sequence[PowerSample]] = tuple,
    known: Sequence[Reached] = (),
) -> AccumulatedWindow:
    """Measure steps of the accumulations in turn until the extrapolated step is known well enough.

    The ranks are left at the smallest accumulation. The policy's lengths hold for all windows
    together, its target for the extrapolated step; one beaten by a known one is measured once.
    """
    parts: list[Window] = []
    points: list[AccumulationPoint] = []
    while True:
        # There and back, so that what drifts does not look like a slope.
        for share, each in _there_and_back(accumulations, len(parts)):
            conductor.set_accumulation(each)
            least_s = share * policy.min_s
            short = replace(policy, min_s=least_s, max_s=least_s, min_steps=LEAST_STEPS)
            before = conductor.micro_batches
            part = conductor.measure(meter, short, each * micro_batch_s, samples=samples)
            taken = conductor.micro_batches - before
            parts.append(part)
            points.append(_point(part, taken / len(part.step_times_s)))
        estimate = fit_accumulation(points, own)
        worst = max(
            estimate.step_time_se_s / estimate.step_time_s,
            estimate.power_se_W / estimate.power_W,
        )
        length_s = math.fsum(part.length_s for part in parts)
        beaten_by = _beaten_by(estimate, known) if worst > policy.target_se else None
        if worst <= policy.target_se or length_s >= policy.max_s or beaten_by:
            break
    conductor.set_accumulation(accumulations[0])
    return replace(AccumulatedWindow.of(parts, estimate), beaten_by=beaten_by)


def _beaten_by(estimate: StepEstimate, known: Sequence[Reached]) -> Reached | None:
    """Return a known configuration that is faster and takes less energy, or None.

    By the lower ends of the step's 90 % intervals, whose errors are Student's already.
    """
    time_rse = estimate.step_time_se_s / estimate.step_time_s
    both = math.hypot(time_rse, estimate.power_se_W / estimate.power_W)
    low_s = estimate.step_time_s * math.exp(-Z90 * time_rse)
    low_J = estimate.step_time_s * estimate.power_W * math.exp(-Z90 * both)
    return ahead_of(low_s, low_J, known)


def _there_and_back(accumulations: Sequence[int], done: int) -> list[tuple[float, int]]:
    """Return the shares and accumulations of the next round, upwards or downwards in turn."""
    order = list(zip(SHARES, accumulations, strict=True))
    return order if done // len(order) % 2 == 0 else order[::-1]


def _point(part: Window, micro_batches: float) -> AccumulationPoint:
    return AccumulationPoint(
        micro_batches=micro_batches,
        steps=len(part.step_times_s),
        step_time_s=part.step_time_s,
        step_time_rse=part.step_time_se_s / part.step_time_s,
        power_W=part.power_W,
        power_rse=part.power_se_W / part.power_W,
    )


def _phases(parts: Sequence[Window], weights: Sequence[float]) -> Mapping[str, float]:
    """Return the seconds of the whole step in each phase, which are lines as the step's are."""
    names = dict.fromkeys(name for part in parts for name in part.phases_s)
    return {
        name: max(
            0.0,
            math.fsum(w * p.phases_s.get(name, 0.0) for w, p in zip(weights, parts, strict=True)),
        )
        for name in names
    }
