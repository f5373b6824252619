"""A training under limits on the whole of it: a deadline, an energy budget, or both.

Its number of steps is known. Under a deadline alone the setting of the least energy is chosen, else
the fastest, of those with which the rest of the run stays within the limits at the upper end of the
estimates. What is not used of a limit is left for the steps to come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.online.bandit import WORTH, Decision, OnlineTuner
from tuner.online.marks import Mark
from tuner.online.response import SURE, UNLIMITED, Views
from tuner.problem.constraints import Constraints, given_limits, limit_on
from tuner.workload.meters import Meter, MeterError, Reading

#: Share of what is left that is kept in reserve: for checkpoints, and an evaluation at the end.
RESERVE = 0.02
#: Share of the spare time that a trial may cost.
TRIAL = 0.25
#: Figures of the whole run that are limited.
FIGURES = ("time_s", "energy_kJ")


class LengthUnknown(Exception):
    """A limit on a training whose number of steps is unknown."""


#: What is said of a limit that is not kept.
LATE = "the deadline cannot be met, even at the highest setting, where it goes on"
POOR = (
    "the energy budget cannot be kept; it goes on at the setting of the least energy found so far"
)
LONG = "the training takes more steps than was stated, so its limits may not be kept"


def run_limits(given: Constraints) -> tuple[float, float] | None:
    """Return the limits on the time (s) and energy (J) of a whole command; None without any."""
    time_s, energy_kJ = (limit_on(name, given.limits) for name in FIGURES)
    if time_s is None and energy_kJ is None:
        return None
    return time_s or math.inf, 1000 * (energy_kJ or math.inf)


class LimitTuner(OnlineTuner):
    """Choice of the live setting by limits on the whole run (`run_limits`)."""

    def __init__(self, x: Sequence[float], *, limits: tuple[float, float], **given: Any) -> None:
        super().__init__(x, max_slowdown=0.0, **given)
        self._limits = limits
        self._timed, self._budgeted = map(math.isfinite, limits)
        self._length, self._before = 0, (0.0, 0.0)
        self.missed = ""

    def begin(self, first: Mark, now: Reading, then: Reading, steps: int | None) -> None:
        """Begin after a step of so many, at `now`, with what the command took since `then`."""
        if steps is None:
            raise LengthUnknown(
                "a deadline and an energy budget need the number of the training's steps, which "
                "its framework does not say; state it by --steps, or steps= in Python"
            )
        self._length = steps - first.step
        self._before = now.time_s - then.time_s, now.energy_J - then.energy_J

    def _rest(self, views: Views, setting: int, sure: float) -> tuple[float, float]:
        # Seconds and joules of the steps that are left at a setting.
        total = self._total(self._earlier, SURE, views)
        stalls = total.seconds / max(total.seconds - self.stalled_s, 0.1 * total.seconds)
        time, time_sd = views.time.value(setting)
        power, power_sd = views.power.value(setting)
        times = max(self._length - self.steps, 1) * stalls
        energy = time + power + sure * math.hypot(time_sd, power_sd)
        return times * math.exp(time + sure * time_sd), times * math.exp(energy)

    def _decide(self) -> Decision:
        if self._reference_due:
            return Decision(0, "reference")
        views = self._views()
        total = self._total(self._earlier, SURE, views)
        spent = (self._before[0] + total.seconds, self._before[1] + total.energy_J)
        left = tuple((1 - RESERVE) * (a - b) for a, b in zip(self._limits, spent, strict=True))
        usable = sorted({0, *self._measured} - self._barred)
        in_time, within = (
            [each for each in usable if self._rest(views, each, SURE)[i] <= left[i]] for i in (0, 1)
        )
        fits = [each for each in in_time if each in within]
        top_s = self._rest(views, 0, 0.0)[0]
        spare_s = max(0.0, left[0] - self._rest(views, 0, SURE)[0])
        self.max_slowdown = spare_s / top_s if self._timed else UNLIMITED
        if self._budgeted and fits:
            choice = min(fits, key=lambda each: views.time.value(each)[0])
        else:  # of those that come nearest; the deadline comes first
            choice = self._least(views, fits or in_time) if in_time else 0
        if self._stale(views, choice):
            self._reference_due = 1
            return Decision(0, "reference")
        if self._budgeted and fits:
            trial = self._faster(views, choice, left)
        else:
            trial = self._hopeful(views, choice, TRIAL * spare_s if self._timed else math.inf)
        late = top_s > (left[0] + RESERVE * top_s)
        poor = trial is None and not within and self._rest(views, choice, 0.0)[1] > left[1]
        long = self.steps > self._length
        self.missed = LONG if long else LATE if late else POOR if poor else ""
        if trial is not None and not late:
            return Decision(trial, "trial")
        return Decision(choice, "choice")

    def _faster(self, views: Views, choice: int, left: tuple[float, ...]) -> int | None:
        # An untried setting that is expected to be faster and to fit as well.
        for each in self._settings:
            tried = each in self._measured or each in self._barred or not self._in_reach(each)
            faster = views.time.value(each)[0] < views.time.value(choice)[0] - WORTH
            rest = self._rest(views, each, 0.0)
            if not tried and faster and all(a <= b for a, b in zip(rest, left, strict=True)):
                return each
        return None


def reading(meter: Meter) -> Reading | None:
    """Return what a meter reads, or None if it fails."""
    try:
        return meter.read()
    except MeterError:
        return None


def kept_limits(
    limits: Constraints, started: Reading | None, meter: Meter
) -> tuple[tuple[str, float, float], ...]:
    """Return each limit on the whole run, by name, with its value and what the run took."""
    now = reading(meter)
    if now is None or started is None:
        return ()
    took = now.time_s - started.time_s, (now.energy_J - started.energy_J) / 1000
    of_run = dict(zip(FIGURES, took, strict=True))
    given = given_limits(limits.limits)
    return tuple(
        (row.name, value, of_run[row.figure]) for row, value in given if row.figure in of_run
    )
