"""A training that follows a target of power: by its clock, on what it measures as it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.online.bandit import STEP, Decision, OnlineTuner
from tuner.online.changes import Change
from tuner.online.promise import SURE, UNLIMITED, available_s
from tuner.online.response import Views
from tuner.online.windows import Chunk

#: Distance that is kept below the target, and the least gain for which a faster setting is entered,
#: in log power.
MARGIN, WORTH = 0.006, 0.004
#: Standard deviations by which a setting is taken to draw more than is expected.
CAUTION = 1.0
#: Windows that the budget must allow for before the highest setting is left.
ENTER = 4
#: Periods of a constant target that are kept.
PERIODS = 10_000

#: Why the target is not met: it is below what the job can draw, above what it may, or the budget of
#: slowdown is spent.
Unmet = Literal["", "low", "high", "budget"]

#: What is said of a target that is not met.
UNMET = {
    "low": "is less than the job can draw: it runs at the lowest setting",
    "high": "is more than the job draws: it runs at the highest setting",
    "budget": "is not followed until the budget of slowdown allows it again",
}


@dataclass
class Period:
    """Time under one target.

    Attributes:
        target_W: asked; None: no limit.
        seconds, energy_J: delivered.
        beyond_s: time of chunks that drew more than was asked.
        unmet: why it was not met at its end.
    """

    target_W: float | None
    seconds: float = 0.0
    energy_J: float = 0.0
    beyond_s: float = 0.0
    unmet: Unmet = ""


class PowerFollower(OnlineTuner):
    """Choice of the fastest live setting within a target of power.

    Args:
        max_slowdown: of the whole run that is allowed; None: any.
        given: as of `OnlineTuner`.

    Attributes:
        target_W: what may be drawn, by the meter's scope; None: no limit.
        periods: what was asked and delivered, in order.
        unmet: why the target is not met.
    """

    def __init__(self, x: Sequence[float], *, max_slowdown: float | None, **given: Any) -> None:
        super().__init__(
            x, max_slowdown=UNLIMITED if max_slowdown is None else max_slowdown, **given
        )
        self.target_W: float | None = None
        self.periods: list[Period] = []
        self.unmet: Unmet = ""
        self._limited = max_slowdown is not None

    def add(self, chunk: Chunk) -> Decision:
        """Add whole steps that ran at the decided setting; return the decision for the next."""
        asked = self.periods[-1].target_W if self.periods else None
        self._record(chunk)
        super().add(chunk)
        if self.target_W != asked:
            self._go(self._decide())
        return self.decision

    def _restart(self, change: Change) -> None:
        super()._restart(change)
        # The window that told is of the new epoch, in which nothing else is known of the power.
        window = self.window
        assert window is not None
        self._time.add(window.setting, self.windows - 1, window.step_time_s)
        self._power.add(window.setting, self.windows - 1, window.power_W)

    def _record(self, chunk: Chunk) -> None:
        last = self.periods[-1] if self.periods else None
        if last is None or (last.target_W != self.target_W and len(self.periods) < PERIODS):
            last = Period(self.target_W)
            self.periods.append(last)
        last.seconds += chunk.seconds
        last.energy_J += chunk.energy_J
        if self.target_W is not None and chunk.energy_J > self.target_W * chunk.seconds:
            last.beyond_s += chunk.seconds

    def _decide(self) -> Decision:
        """Return the fastest setting within the target, or the highest if the budget is spent."""
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
        self.unmet = "low" if low else "high" if high else ""
        if wanted and self._limited and not self._affordable(wanted):
            self.unmet = "budget"
            return Decision(0, "choice")
        return Decision(wanted, "choice")

    def _depth(self, views: Views, most: float) -> float:
        """Return how far below the lowest measured setting one may be entered, in x."""
        if self._limited:
            return STEP
        lowest = max(self._measured, key=self._x.__getitem__)
        drawn, top = views.power.value(lowest)[0], views.power.value(0)[0]
        # A limit that does not bind tells nothing of those below it, else power falls by the limit.
        idle = self._x[lowest] if top - drawn < MARGIN else 0.0
        return max(STEP, idle, drawn - most)

    def _affordable(self, setting: int) -> bool:
        views = self._views()
        total = self._total(self._earlier_sure, SURE, views)
        left_s = available_s(total.seconds, total.lost_s[2], self.max_slowdown)
        # From the highest setting it is entered only for some time, and not for a moment.
        windows = ENTER if self.decision.setting == 0 else 1
        return self._loss_s(views, setting, windows) <= max(0.0, left_s)
