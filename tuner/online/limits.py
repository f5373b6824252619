"""A training under limits on the whole of it: a deadline, an energy budget, or both.

Its number of steps is known. Under a deadline alone the setting of the least energy is chosen, else
the fastest, of those with which the rest of the run stays within the limits at the upper end of the
estimates. What is not used of a limit is left for the steps to come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tuner.online.bandit import WORTH, Decision, OnlineTuner, _Views
from tuner.online.promise import SURE
from tuner.online.response import Studied

#: Share of what is left that is kept in reserve: for checkpoints, and an evaluation at the end.
RESERVE = 0.02
#: Share of the spare time that a trial may cost.
TRIAL = 0.25
#: Slowdown that stands for no limit.
UNLIMITED = 1e6

#: Why a limit is not kept: it cannot be, or the training is longer than was stated.
Missed = Literal["", "deadline", "budget", "length"]


class LengthUnknown(Exception):
    """A limit on a training whose number of steps is unknown."""


class LimitTuner(OnlineTuner):
    """Choice of the live setting by limits on the whole run.

    Args:
        deadline_s, budget_kJ: None: no limit.

    Attributes:
        missed: which limit is not kept, as far as is known.
    """

    def __init__(
        self,
        x: Sequence[float],
        *,
        deadline_s: float | None,
        budget_kJ: float | None,
        window_s: float,
        settle_s: float,
        studied: Sequence[Studied] = (),
    ) -> None:
        super().__init__(x, max_slowdown=0.0, window_s=window_s, settle_s=settle_s, studied=studied)
        self._timed, self._budgeted = deadline_s is not None, budget_kJ is not None
        self._limits = (deadline_s or math.inf, 1000 * (budget_kJ or math.inf))
        self._length, self._before = 0, (0.0, 0.0)
        self.missed: Missed = ""

    def begin(self, steps: int, seconds: float, energy_J: float) -> None:
        """Tell the number of steps from here on, and what was spent before."""
        self._length, self._before = steps, (seconds, energy_J)

    def _rest(self, views: _Views, setting: int, sure: float) -> tuple[float, float]:
        """Return seconds and joules of the steps that are left at a setting."""
        total = self._total(self._earlier, SURE, views)
        stalls = total.seconds / max(total.seconds - self.stalled_s, 0.1 * total.seconds)
        time, time_sd = views.time.value(setting)
        power, power_sd = views.power.value(setting)
        times = max(self._length - self.steps, 1) * stalls
        both_sd = math.hypot(time_sd, power_sd)
        return times * math.exp(time + sure * time_sd), times * math.exp(
            time + power + sure * both_sd
        )

    def _decide(self) -> Decision:
        if self._reference_due:
            return Decision(0, "reference")
        views = self._views()
        total = self._total(self._earlier, SURE, views)
        spent = (self._before[0] + total.seconds, self._before[1] + total.energy_J)
        left = tuple((1 - RESERVE) * (a - b) for a, b in zip(self._limits, spent, strict=True))
        usable = [
            each for each in self._settings if each in self._measured and each not in self._barred
        ]
        usable = usable if 0 in usable else [0, *usable]
        in_time, within = (
            [each for each in usable if self._rest(views, each, SURE)[i] <= left[i]] for i in (0, 1)
        )
        fits = [each for each in in_time if each in within]
        top_s = self._rest(views, 0, 0.0)[0]
        spare_s = max(0.0, left[0] - self._rest(views, 0, SURE)[0])
        self.max_slowdown = spare_s / top_s if self._timed else UNLIMITED
        choice = self._pick(views, fits, in_time)
        if self._stale(views, choice):
            self._reference_due = 1
            return Decision(0, "reference")
        trial_s = TRIAL * spare_s if self._timed else math.inf
        saving = not self._budgeted or not fits
        trial = (
            self._hopeful(views, choice, trial_s) if saving else self._faster(views, choice, left)
        )
        late = top_s > (left[0] + RESERVE * top_s)
        poor = trial is None and not within and self._rest(views, choice, 0.0)[1] > left[1]
        self.missed = "deadline" if late else "budget" if poor else ""
        if self.steps > self._length:
            self.missed = "length"
        if trial is not None and not late:
            return Decision(trial, "trial")
        return Decision(choice, "choice")

    def _pick(self, views: _Views, fits: Sequence[int], in_time: Sequence[int]) -> int:
        """Return the best of the settings that fit, or of those that come nearest."""
        if fits and self._budgeted:
            return min(fits, key=lambda each: views.time.value(each)[0])
        if not (within := fits or in_time):
            return 0  # the deadline comes first
        best = min(within, key=lambda each: views.energy(each)[0])
        keep = self._choice in within
        if keep and views.energy(self._choice)[0] - views.energy(best)[0] < WORTH:
            return self._choice
        return best

    def _faster(self, views: _Views, choice: int, left: tuple[float, ...]) -> int | None:
        """Return an untried setting that is expected to be faster and to fit as well."""
        for each in self._settings:
            tried = each in self._measured or each in self._barred
            faster = views.time.value(each)[0] < views.time.value(choice)[0] - WORTH
            rest = self._rest(views, each, 0.0)
            if not tried and faster and all(a <= b for a, b in zip(rest, left, strict=True)):
                return each
        return None
