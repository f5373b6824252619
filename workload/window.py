"""One window: from boundary to boundary, whole optimizer steps, time and energy of the same span.

The ranks run freely between two boundaries that the `Conductor` names; at a boundary every rank has
finished its device's work and waits, so what the counters read belongs to the steps in between and
to nothing else. A window closes when the standard error of the step time is small enough, or when
its time is up, never before its least length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workload.meters.base import Meter, PowerSample, Reading
from workload.probe import Failure, WindowPolicy
from workload.ranks import Event, RankGroup

__all__ = ["Conductor", "ProbeFailed", "Window", "batch_means_error", "standard_error"]

#: Warm-up ends when the last steps agree to this relative spread; see `Conductor.warm_up`.
_WARM_SPREAD = 0.15
_WARM_STEPS = 2
_WARM_STEPS_MAX = 8


class ProbeFailed(Exception):
    """Carries the `Failure` out of the depths of a probe to where the record is written."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Window:
    """What lies between two boundaries.

    Attributes:
        opened, closed: the meter's readings at the two boundaries.
        step_times_s: wall time of each step, as the last rank finished it.
    """

    opened: Reading
    closed: Reading
    step_times_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        return self.closed.time_s - self.opened.time_s

    @property
    def energy_J(self) -> float:
        return self.closed.energy_J - self.opened.energy_J


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of a series whose neighbours are correlated.

    The variance of the mean is widened by (1 + r) / (1 - r), r the lag-1 autocorrelation where it
    is positive (the effective sample size of an AR(1) series; Zieba 2010, "Effective number of
    observations and unbiased estimators of variance for autocorrelated data"). NaN below 2 values.
    """
    series = np.asarray(values, dtype=float)
    if series.size < 2:
        return math.nan
    centred = series - series.mean()
    variance = float(centred @ centred) / (series.size - 1)
    if variance == 0.0:
        return 0.0
    lag1 = float(centred[1:] @ centred[:-1]) / float(centred @ centred)
    lag1 = min(max(lag1, 0.0), 0.95)
    return math.sqrt(variance / series.size * (1 + lag1) / (1 - lag1))


def batch_means_error(samples: Sequence[PowerSample], batches: int = 8) -> float:
    """Standard error of a window's mean power, watts, from its sampled timeline.

    Batch means: the samples are cut into equal blocks, longer than their correlation, and the
    blocks' means are taken as independent. NaN with fewer than two samples a block.
    """
    power = np.array([sample.power_W for sample in samples], dtype=float)
    if power.size < 2 * batches:
        return math.nan
    blocks = np.array([block.mean() for block in np.array_split(power, batches)])
    return float(blocks.std(ddof=1) / math.sqrt(batches))


class Conductor:
    """Leads the ranks of one probe from boundary to boundary.

    Args:
        group: the ranks.
        deadline_s: CLOCK_MONOTONIC at which the probe is out of time.
        step_limit_s: a step that takes longer than this is a hang.
        explain_exit: turns a rank's exit code into a Failure.
        cancelled: asked often; True ends the probe.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        deadline_s: float,
        step_limit_s: float,
        explain_exit: Callable[[int, int], Failure],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group, self._deadline_s = group, deadline_s
        self._step_limit_s, self._explain_exit = step_limit_s, explain_exit
        self._cancelled = cancelled
        self.done = 0  # steps all ranks have done
        self.peaks: list[dict[str, int]] = []
        self.phases: list[tuple[float, str]] = []
        self._last_at_s = 0.0

    def first_step(self) -> float:
        """Wait for the first step of all ranks; CLOCK_MONOTONIC of its end."""
        self._wait_boundary(1)
        return self._last_at_s

    def run(self, steps: int) -> tuple[float, ...]:
        """Let the ranks do `steps` more steps; each step's wall time, seconds."""
        target = self.done + steps
        began = time.monotonic()
        self._group.send(f"run {target}")
        ends = self._wait_boundary(target)
        marks = [began, *ends]
        return tuple(b - a for a, b in pairwise(marks))

    def warm_up(self) -> tuple[float, ...]:
        """Run until two neighbouring steps agree, at least 2 steps and at most 8."""
        times: list[float] = []
        while len(times) < _WARM_STEPS_MAX:
            times += self.run(1)
            if len(times) >= _WARM_STEPS and _agree(times[-2], times[-1]):
                break
        return tuple(times)

    def settle(self, seconds: float, step_time_s: float) -> None:
        """Run under a new live setting without measuring."""
        if seconds > 0:
            self.run(max(1, math.ceil(seconds / step_time_s)))

    def measure(self, meter: Meter, policy: WindowPolicy, step_time_s: float) -> Window:
        """One window under the setting that now stands.

        Args:
            meter: read at both boundaries, while all ranks wait.
            policy: least and greatest length, and the error that ends it.
            step_time_s: expected, from the warm-up.
        """
        times: list[float] = []
        opened = closed = meter.read()
        while (missing_s := _missing_s(policy, times, closed.time_s - opened.time_s)) > 0:
            steps = max(1, math.ceil(missing_s / step_time_s), policy.min_steps - len(times))
            times += self.run(steps)
            closed = meter.read()
            step_time_s = sum(times) / len(times)
        return Window(opened, closed, tuple(times))

    def finish(self) -> None:
        """Tell the ranks to stop and gather their peaks; a rank that does not is killed later."""
        self._group.send("quit")
        ended: set[int] = set()
        until = min(self._deadline_s, time.monotonic() + 5.0)
        while len(ended) < self._group.size and time.monotonic() < until:
            event = self._group.next_event(until - time.monotonic())
            if event is None:
                break
            if event.kind == "peak" and event.detail is not None:
                self.peaks.append(dict(event.detail))
            if event.kind in ("end", "exit"):
                ended.add(event.rank)

    def _wait_boundary(self, target: int) -> list[float]:
        """Wait until all ranks stand at step `target`; when all had done each step until it."""
        arrived: set[int] = set()
        ends: dict[int, float] = {}
        while len(arrived) < self._group.size:
            now = time.monotonic()
            limit = min(self._deadline_s, now + self._step_limit_s)
            event = self._next(limit)
            if event.kind in ("step", "at"):
                ends[event.step] = max(ends.get(event.step, 0.0), event.time_s)
            if event.kind == "at":
                arrived.add(event.rank)
        self.done = target
        self._last_at_s = ends[target]
        return [ends[step] for step in sorted(ends)]

    def _next(self, limit_s: float) -> Event:
        """The next event that is not a failure; failures are raised with the best explanation."""
        while True:
            if self._cancelled():
                raise ProbeFailed(Failure("cancelled", "the probe was cancelled"))
            now = time.monotonic()
            if now >= limit_s:
                if now >= self._deadline_s:
                    raise ProbeFailed(
                        Failure("time_limit", f"out of time after {self.done} optimizer steps")
                    )
                raise ProbeFailed(
                    Failure(
                        "hang",
                        f"no optimizer step within {self._step_limit_s:.0f} s, "
                        f"after {self.done} steps",
                    )
                )
            event = self._group.next_event(min(0.5, limit_s - now))
            if event is None:
                continue
            if event.kind == "phase" and event.detail is not None:
                if event.rank == 0:
                    self.phases.append((event.time_s, str(event.detail["name"])))
                continue
            if event.kind in ("fail", "end", "exit"):
                raise ProbeFailed(self._explain(event))
            return event

    def _explain(self, first: Event) -> Failure:
        """The cause among what the ranks say as they fall: peers of a dead rank fail too."""
        events = [first]
        until = time.monotonic() + 1.0
        while len({e.rank for e in events if e.kind == "exit"}) < self._group.size:
            event = self._group.next_event(until - time.monotonic())
            if event is None:
                break
            events.append(event)
        causes: list[Failure] = []
        effects: list[Failure] = []
        spoke = {event.rank for event in events if event.kind == "fail"}
        for event in events:
            if event.detail is None:
                continue
            if event.kind == "fail":
                said = Failure(event.detail["kind"], event.detail["message"])
                (effects if event.detail.get("effect") else causes).append(said)
            elif event.kind == "exit" and event.detail["code"] and event.rank not in spoke:
                causes.append(self._explain_exit(event.rank, int(event.detail["code"])))
        order = ("out_of_memory", "refused", "crash")
        # Stable: among causes of one kind the first that was heard is the cause.
        causes.sort(key=lambda failure: order.index(failure.kind))
        causes += effects
        if causes:
            return causes[0]
        return Failure(
            "crash",
            f"the program ended by itself after {self.done} optimizer steps, before the "
            "measurement was complete; give it more steps than the probe needs",
        )


def _missing_s(policy: WindowPolicy, times: Sequence[float], length_s: float) -> float:
    """Seconds that a window still lacks; 0 when it is complete."""
    if length_s < policy.min_s or len(times) < policy.min_steps:
        # 2 % more than asked, so that slightly fast steps do not cost another boundary.
        return max((policy.min_s - length_s) * 1.02, 1e-3)
    excess = standard_error(times) / (policy.target_se * float(np.mean(times)))
    if excess <= 1.0 or length_s >= policy.max_s:
        return 0.0
    # The error falls with the root of the length: go half of the way that this promises, then look.
    return min(length_s * (excess**2 - 1) / 2, policy.max_s - length_s, policy.min_s)


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= _WARM_SPREAD * min(a, b)
