"""Trainings with another aim than a promised slowdown: a target of power, or limits on the run.

A target of power in watts is told by a file or a web server. A training under a deadline or an
energy budget has a known number of steps: under a deadline alone the setting of the least energy is
chosen, else the fastest, of those with which the rest of the run stays within the limits at the
upper end of the estimates. What is not used of a limit is left for the steps to come.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.online.bandit import STEP, WORTH, Decision, OnlineTuner
from tuner.online.response import SURE, UNLIMITED, Views
from tuner.online.windows import Chunk, Mark
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters import Meter, MeterError, Reading

#: Distance that is kept below the target, in log power.
MARGIN = 0.006
#: Standard deviations by which a setting is taken to draw more than is expected.
CAUTION = 1.0
#: Windows that the budget must allow for before the highest setting is left.
ENTER = 4

#: What is said of a target that is not met.
LOW = "is less than the job can draw: it runs at the lowest setting"
HIGH = "is more than the job draws: it runs at the highest setting"
SPENT = "is not followed until the budget of slowdown allows it again"
#: Seconds between two readings, and those that a server may take.
EVERY_S, TIMEOUT_S = 1.0, 5.0
#: A target that changes by more than this factor counts when it is read a second time: a file may
#: be read while it is written.
JUMP = 2.0
#: Most bytes of a reading.
MOST = 4096
#: Share of what is left that is kept in reserve: for checkpoints, and an evaluation at the end.
RESERVE = 0.02
#: Share of the spare time that a trial may cost.
TRIAL = 0.25
#: Figures of the whole run that are limited.
FIGURES = ("time_s", "energy_kJ")
#: What is said of a limit that is not kept.
LATE = "the deadline cannot be met, even at the highest setting, where it goes on"
POOR = (
    "the energy budget cannot be kept; it goes on at the setting of the least energy found so far"
)
LONG = "the training takes more steps than was stated, so its limits may not be kept"


def watts_of(text: str) -> float | None:
    """Return the target of a text: a number of watts, or None for "none"; else raise InputError."""
    word = text.strip().removesuffix("W").strip()
    if word.lower() == "none":
        return None
    with contextlib.suppress(ValueError):
        watts = float(word)
        if 0 < watts < math.inf:
            return watts
    raise InputError(f"{text.strip()[:40]!r} is not a target: write a number of watts, or none")


class Signal:
    """Latest target of a file, or of an address that begins with http:// or https://; or watts."""

    def __init__(self, source: str | float) -> None:
        # Why the source cannot be read, or that its target jumped.
        self._source, self.problem = source, ""
        try:
            self.target_W = watts_of(self._text())  # the last good one; None: no limit
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--follow-power: {source} cannot be read: {why}") from error
        self._jumped: float | None = None

    def start(self) -> None:
        """Begin to follow the source, until the process ends."""
        if isinstance(self._source, str):
            threading.Thread(target=self._follow, daemon=True).start()

    def _text(self) -> str:
        if not isinstance(self._source, str):
            return str(self._source)
        if self._source.startswith(("http://", "https://")):
            with urllib.request.urlopen(self._source, timeout=TIMEOUT_S) as response:
                return str(response.read(MOST).decode(errors="replace"))
        with Path(self._source).open("rb") as file:
            return file.read(MOST).decode(errors="replace")

    def read(self) -> None:
        """Read the source's present target."""
        try:
            watts = watts_of(self._text())
        except Exception as error:  # whatever a server answers, the training goes on
            why = getattr(error, "strerror", None) or error
            self.problem = f"the power signal stopped: {why}; its last target stays"
            return
        before = self.target_W
        far = watts is not None and before is not None and not 1 / JUMP <= watts / before <= JUMP
        if far and watts != self._jumped:
            self._jumped = watts
            self.problem = f"the power signal jumped from {before:g} W to {watts:g} W, which is "
            self.problem += "followed once it is read again"
            return
        self._jumped, self.target_W = None, watts
        self.problem = self.problem if far else ""

    def _follow(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.read()


@dataclass
class Period:
    """Time under one target (None: no limit), `beyond_s` of it in chunks that drew more."""

    target_W: float | None
    seconds: float = 0.0
    energy_J: float = 0.0
    beyond_s: float = 0.0

    def add(self, chunk: Chunk) -> None:
        """Add whole steps that ran in this time."""
        self.seconds += chunk.seconds
        self.energy_J += chunk.energy_J
        if self.target_W is not None and chunk.energy_J > self.target_W * chunk.seconds:
            self.beyond_s += chunk.seconds


class PowerFollower(OnlineTuner):
    """Choice of the fastest live setting within a target of power, by the meter's scope, with any
    slowdown of the whole run if `max_slowdown` is None."""

    def __init__(self, x: Sequence[float], *, max_slowdown: float | None, **given: Any) -> None:
        most = UNLIMITED if max_slowdown is None else max_slowdown
        super().__init__(x, max_slowdown=most, **given)
        self.target_W: float | None = None
        self.periods: list[Period] = []
        self.unmet = ""
        self._limited = max_slowdown is not None

    def follow(self, target_W: float | None) -> None:
        """Choose by this target from the next steps on; None: without a limit."""
        self.target_W = target_W

    def add(self, chunk: Chunk) -> Decision:
        """Add whole steps that ran at the decided setting; return the decision for the next."""
        last = self.periods[-1] if self.periods else Period(None)
        changed = last.target_W != self.target_W
        if changed or not self.periods:
            self.periods.append(last := Period(self.target_W))
        last.add(chunk)
        super().add(chunk)
        if changed:
            self._go(self._decide())
        return self.decision

    def _decide(self) -> Decision:
        usable = sorted({*self._settings} - self._barred)
        if self.target_W is None or not self._measured:
            self.unmet = ""
            return Decision(0, "choice")
        here, most, views = self.decision.setting, math.log(self.target_W) - MARGIN, self._views()
        drawn, more = {}, max(0.0, self._power.lately(here))
        for each in usable:
            mean, sd = views.power.value(each)
            drawn[each] = mean + CAUTION * sd + more + (WORTH if each < here else 0.0)
        reach = [each for each in usable if self._in_reach(each, self._depth(views, most))]
        fits = [each for each in reach if drawn[each] <= most]
        wanted = min(fits) if fits else reach[-1]
        low = not fits and usable[-1] in self._measured
        high = wanted == 0 and drawn[0] < most - 5 * MARGIN
        self.unmet = LOW if low else HIGH if high else ""
        # From the highest setting it is entered only for some time, and not for a moment.
        cost_s = self._loss_s(views, wanted, ENTER if here == 0 else 1)
        if wanted and self._limited and cost_s > max(0.0, self._left_s(views)[0]):
            self.unmet, wanted = SPENT, 0
        return Decision(wanted, "choice")

    def _depth(self, views: Views, most: float) -> float:
        # How far below the lowest measured setting one may be entered, in x.
        if self._limited:
            return STEP
        lowest = max(self._measured, key=self._x.__getitem__)
        drawn, top = views.power.value(lowest)[0], views.power.value(0)[0]
        # A limit that does not bind tells nothing of those below it, else power falls by the limit.
        idle = self._x[lowest] if top - drawn < MARGIN else 0.0
        return max(STEP, idle, drawn - most)


class LengthUnknown(Exception):
    """A limit on a training whose number of steps is unknown."""


def run_limits(given: Constraints) -> tuple[float, float] | None:
    """Return the limits on the time (s) and energy (J) of a whole command; None without any."""
    time_s, energy_kJ = given.limits.deadline_s, given.limits.budget_kJ
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
        """Begin after `steps` steps, at `now`, with the command's consumption since `then`."""
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
    """Return a meter's reading, or None if it fails."""
    try:
        return meter.read()
    except MeterError:
        return None


def kept_limits(
    limits: Constraints, started: Reading | None, meter: Meter
) -> tuple[tuple[str, float, float], ...]:
    """Return each limit on the whole run, by name, with its value and the run's total."""
    now = reading(meter)
    if now is None or started is None:
        return ()
    took = now.time_s - started.time_s, (now.energy_J - started.energy_J) / 1000
    of_run = dict(zip(FIGURES, took, strict=True))
    given = limits.limits.given
    return tuple(
        (row.name, value, of_run[row.figure]) for row, value in given if row.figure in of_run
    )
