"""Safe bandit over live settings: the next setting after each window of whole steps.

It saves what it can under the promise that the whole run takes at most 1 + max_slowdown times as
long as at the highest setting, also while it explores: loss is charged at the upper end of its
estimate, and a window is run only if the promise would hold after it. A change of the job or the
machine begins a new epoch, with windows at the highest setting first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tuner.online.response import (
    POWER,
    STEP_TIME,
    SURE,
    Balance,
    Response,
    StudiedSetting,
    Views,
    available_s,
    balance,
)
from tuner.online.windows import NEW_USUAL, Change, ChangeDetector, Chunk, Window, WindowCollector
from tuner.search_spaces.errors import InvalidValue

#: Windows at the highest setting at the start of the run and of each epoch.
FIRST, AFRESH = 4, 2
#: Windows from one change of the step time to the next within which settings cannot be compared:
#: then twice as many windows at the highest setting follow each time, and no more than these.
CALM = 25
#: Windows of a reference visit. Visits are at least APART windows apart, and at most LATEST and
#: LATEST_SHARE of the run so far: a change that only the highest setting shows is then found before
#: it can matter much.
VISIT, APART, LATEST, LATEST_SHARE = 2, 25, 40, 0.1
#: Standard deviation of the chosen setting's slowdown, as a share of the promise, from which the
#: reference is visited again.
STALE = 0.12
#: Energy that a setting must save against the current one to be worth a switch, or be able to save
#: to be worth a trial, as a share.
WORTH, HOPE = 0.004, 0.01
#: Windows that a setting beyond the promise must be affordable for to be entered.
AFFORD = 20
#: How far below the lowest measured setting one is tried where no law bounds its slowdown, in x.
STEP = 0.07
#: Share of the allowance that is saved for trials of values of which nothing is known.
SAVED = 0.5
#: Distance of step time or power, in logarithms, from which earlier measurements are of another job
#: or device.
UNLIKE = 0.1


@dataclass(frozen=True)
class Decision:
    """Setting of the next window, and why."""

    setting: int
    reason: Literal["reference", "trial", "choice"]


class OnlineTuner:
    """Bandit over the live settings of one training.

    Args:
        x, declared: as of `tuner.online.response.Response`.
        max_slowdown: promised for the time of the whole run; 0.05 is 5 %.
        studied: earlier measurements of settings; dropped if the job differs from them.
        stepwise: a setting is tried only just below one that was measured: how much it slows the
            steps is bounded by no law, as a power limit that comes near the idle power.
    """

    def __init__(
        self,
        x: Sequence[float],
        *,
        max_slowdown: float,
        window_s: float = 8.0,
        settle_s: float = 2.0,
        studied: Mapping[int, StudiedSetting] | None = None,
        declared: Sequence[tuple[object, ...]] = (),
        stepwise: bool = False,
    ) -> None:
        if len(x) < 2:
            raise InvalidValue("settings", len(x), "at least two live settings to choose from")
        if not 0 <= max_slowdown < math.inf:
            raise InvalidValue("max_slowdown", max_slowdown, "a share of at least 0, e.g. 0.05")
        self.max_slowdown = max_slowdown
        self._window_s, self._settle_s = window_s, settle_s
        self._studied = dict(studied or {})
        self._time = Response(x, STEP_TIME, self._studied, declared)
        self._power = Response(x, POWER, self._studied, declared)
        self._declared = declared or [()] * len(x)
        self.unlike: Change | None = None  # from the earlier measurements, which were then dropped
        self.window: Window | None = None  # that the last chunk completed
        self._x, self._settings = tuple(x), range(len(x))
        self._measured: set[int] = set()  # in this run
        self._barred: set[int] = set()
        self._collector = WindowCollector(window_s, settle_s)
        self._detectors = (ChangeDetector("step time"), ChangeDetector("power"))
        # What was spent in this epoch until the last reference visit, and since then.
        self._spent, self._unconfirmed = np.zeros((2, 3, len(x)))
        self._earlier, self._earlier_sure = Balance(), Balance()
        self._reference_due, self._last_reference = FIRST, 0
        self.steps = self.windows = 0
        self._chunk_s = 0.0
        self.changes: list[Change] = []
        self.decision = Decision(0, "reference")
        self._choice = 0
        self._afresh, self._changed = AFRESH, -CALM
        self._stepwise = stepwise

    @property
    def restless(self) -> bool:
        """True if step time changes too often to compare settings."""
        return self._afresh > 2 * AFRESH

    @property
    def stalled_s(self) -> float:
        """Time of evaluation, checkpoints and stalls beyond that of their usual steps, seconds."""
        return self._collector.stalled_s

    def bar(self, setting: int) -> Decision:
        """Exclude a refused setting and every setting that shares an untried value with it; return
        the next decision.
        """
        seen = {value for each in {0, *self._measured} for value in enumerate(self._declared[each])}
        untried = {*enumerate(self._declared[setting])} - seen
        self._barred |= {i for i in self._settings[1:] if untried & {*enumerate(self._declared[i])}}
        if setting:
            self._barred.add(setting)
        self._go(Decision(0, "reference"))
        return self.decision

    def add(self, chunk: Chunk) -> Decision:
        """Add whole steps that ran at the decided setting; return the decision for the next."""
        self.steps += chunk.steps
        self._chunk_s = chunk.seconds
        tried_J = chunk.energy_J if self.decision.reason != "choice" else 0.0
        self._unconfirmed[:, self.decision.setting] += chunk.seconds, chunk.energy_J, tried_J
        self.window = self._collector.add(chunk)
        if self.window is not None:
            self._compare(self.window)
            self._learn(self.window)
            self._go(self._decide())
        return self.decision

    def _go(self, decision: Decision) -> None:
        if decision.setting != self.decision.setting:
            mean, sd = self._time.posterior(self.windows).value(decision.setting)
            patience = 2 if self._untried(decision.setting) else NEW_USUAL
            self._collector.switch(decision.setting, math.exp(mean + SURE * sd), patience)
        if decision.reason == "choice":
            self._choice = decision.setting
        self.decision = decision

    # ---- learning

    def _views(self, *, past: bool = False) -> Views:
        # As of now, or, for what was spent, of the means so far (past).
        now = self.windows
        return Views(self._time.posterior(now, past=past), self._power.posterior(now, past=past))

    def _compare(self, window: Window) -> None:
        # Drops the earlier measurements if the same setting is now another.
        earlier = self._studied.get(window.setting)
        if earlier is None or self.changes:
            return
        slower, more = window.step_time_s / earlier.step_time_s, window.power_W / earlier.power_W
        if abs(math.log(slower)) > UNLIKE:
            self.unlike = Change("step time", self.windows, slower - 1, self.steps)
        if abs(math.log(more)) > UNLIKE:
            self.unlike = Change("power", self.windows, more - 1, self.steps)
        if self.unlike is not None:
            self._studied = {}
            self._time.drop_studied()
            self._power.drop_studied()

    def _learn(self, window: Window) -> None:
        change = None
        measured = (window.step_time_s, window.power_W)
        for response, detector, value in zip(
            (self._time, self._power), self._detectors, measured, strict=True
        ):
            if response.here(window.setting):  # else the model may be wrong of the setting
                mean, sd = response.posterior(self.windows).value(window.setting)
                residual = math.log(value) - mean
                deviation = math.hypot(sd, response.noise, response.common)
                change = detector.add(self.windows, residual, deviation) or change
            response.add(window.setting, self.windows, value)
        self._measured.add(window.setting)
        if window.setting == 0:
            self._reference_due = max(0, self._reference_due - 1)
            self._last_reference = self.windows
        self.windows += 1
        if change is not None:
            self._restart(change, window)
        elif window.setting == 0 and not self._reference_due:
            self._spent += self._unconfirmed
            self._unconfirmed = np.zeros_like(self._spent)

    def _restart(self, change: Change, last: Window) -> None:
        # Closes the account of this epoch as of the last reference visit, and begins another.
        for response in (self._time, self._power):
            response.forget(change.since)
        # When it began since the last reference visit is unknown: that time is the new epoch's.
        views = self._views()
        self._earlier += balance(self._spent, self._views(past=True), self._choice, 1.645)
        self._earlier_sure += balance(self._spent, views, self._choice, SURE)
        self._spent, self._unconfirmed = self._unconfirmed, np.zeros_like(self._spent)
        for response, value in ((self._time, last.step_time_s), (self._power, last.power_W)):
            response.begin(len(self.changes) + 1)
            response.add(last.setting, self.windows - 1, value)  # the window that told is of it
        for detector in self._detectors:
            detector.reset()
        self.changes.append(replace(change, step=self.steps))
        if change.quantity == "step time":
            soon = self.windows - self._changed < CALM
            self._afresh = min(2 * self._afresh, CALM) if soon else AFRESH
            self._changed = self.windows
        self._reference_due = self._afresh

    # ---- the account

    def _total(self, earlier: Balance, sure: float, views: Views) -> Balance:
        spent = self._spent, self._unconfirmed
        return sum((balance(each, views, self._choice, sure) for each in spent), earlier)

    @property
    def balance(self) -> Balance:
        """Loss and saving so far against the run at the highest setting, with 90 % intervals."""
        return self._total(self._earlier, 1.645, self._views(past=True))

    def relative(self) -> list[tuple[float, float]]:
        """Return step time and power of each setting relative to the highest, as estimated."""
        views = self._views()
        return [
            (math.exp(views.time.relative(each)[0]), math.exp(views.power.relative(each)[0]))
            for each in self._settings
        ]

    # ---- deciding

    def _decide(self) -> Decision:
        if self._reference_due:
            return Decision(0, "reference")
        views = self._views()
        left_s, earned_s = self._left_s(views)
        # Part of the allowance is saved for values of which nothing is known.
        untried = any(map(self._untried, {*self._settings} - self._barred))
        saved_s = SAVED * earned_s if untried else 0.0
        allowed = [each for each in self._settings if self._allowed(views, each, left_s - saved_s)]
        choice = self._least(views, allowed)
        if self._stale(views, choice):
            self._reference_due = VISIT
            return Decision(0, "reference")
        if (trial := self._hopeful(views, choice, left_s, saved_s)) is not None:
            return Decision(trial, "trial")
        return Decision(choice, "choice")

    def _left_s(self, views: Views) -> tuple[float, float]:
        # Time that may still be lost, and that might if nothing had been, seconds.
        total = self._total(self._earlier_sure, SURE, views)
        left_s = available_s(total.seconds, total.lost_s[2], self.max_slowdown)
        return left_s, available_s(total.seconds, 0.0, self.max_slowdown)

    def _loss_s(self, views: Views, setting: int, windows: float) -> float:
        # Budget, seconds, that some windows at a setting may cost; negative: they earn. Steps that
        # cross the settling time after a switch are charged as the setting's own.
        slow, slow_sd = views.time.relative(setting)
        longest = slow + SURE * slow_sd
        if setting not in self._measured:  # in proportion to the clock, whatever a study says
            longest = max(longest, self._x[setting])
        # Both end with a whole chunk, which may be one long step.
        settle_s = self._settle_s + self._chunk_s if setting != self.decision.setting else 0.0
        seconds = windows * (self._window_s + self._chunk_s) + settle_s
        if setting not in self._measured and self._untried(setting):
            return 2 * seconds  # nothing bounds how much it slows the steps
        lost_s = seconds * -math.expm1(-longest)
        return -available_s(seconds, lost_s, self.max_slowdown)

    def _untried(self, setting: int) -> int:
        # Number of values of declared knobs that no window of this run had.
        seen = [self._declared[each] for each in {0, *self._measured}]
        return sum(
            all(values[i] != value for values in seen)
            for i, value in enumerate(self._declared[setting])
        )

    def _in_reach(self, setting: int, depth: float = STEP) -> bool:
        # The next below the lowest measured one, or not far below.
        highest = max((self._x[each] for each in self._measured), default=0.0)
        below = min((x for x in self._x if x > highest), default=math.inf)
        return not self._stepwise or self._x[setting] <= max(below, highest + depth)

    def _allowed(self, views: Views, setting: int, left_s: float) -> bool:
        if setting == 0:
            return True
        if setting in self._barred or setting not in self._measured:
            return False
        windows = 1 if setting == self.decision.setting else AFFORD
        cost_s = self._loss_s(views, setting, windows)
        return cost_s <= max(0.0, left_s) and self._loss_s(views, setting, 1) <= left_s

    def _least(self, views: Views, among: Sequence[int]) -> int:
        # Of the least energy; the current one if it is as good.
        best = min(among, key=lambda each: views.energy(each)[0])
        gain = views.energy(self._choice)[0] - views.energy(best)[0]
        return self._choice if self._choice in among and gain < WORTH else best

    def _stale(self, views: Views, choice: int) -> bool:
        # The reference is too old to be sure of the chosen setting's slowdown.
        since = self.windows - self._last_reference
        if self.decision.setting == 0 or since < APART:
            return False
        if since > max(LATEST, LATEST_SHARE * self.windows):
            return True
        return views.time.relative(choice)[1] > STALE * self.max_slowdown + 0.0005

    def _hopeful(
        self, views: Views, choice: int, left_s: float, saved_s: float = 0.0
    ) -> int | None:
        # The setting whose trial may save most, if it is affordable and worth it.
        best, most = None, HOPE
        here = views.energy(choice)[0]
        for each in self._settings:
            if each in (0, choice) or each in self._barred:
                continue
            if self._untried(each) > 1 or not self._in_reach(each):
                continue
            slow, slow_sd = views.time.relative(each)
            if slow - slow_sd > math.log1p(self.max_slowdown):
                continue  # it could not be kept
            mean, sd = views.energy(each)
            worth = here - (mean - sd)
            able_s = left_s if self._untried(each) else left_s - saved_s
            if sd > WORTH and worth > most and self._loss_s(views, each, 1) <= able_s:
                best, most = each, worth
        if best is None and self._studied and self._measured == {0}:
            # Earlier measurements that let hope for nothing are checked once.
            usable = filter(self._in_reach, self._studied.keys() - self._barred)
            able = [i for i in usable if self._loss_s(views, i, 1) <= left_s]
            best = max(able, default=0) or None
        return best
