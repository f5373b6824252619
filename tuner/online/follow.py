"""A training that follows a target of power: by its clock, on what it measures as it goes.

The power at each setting is followed by its recent chunks, and that of other settings by the line
between the logarithms of the nearest measured ones. The loss is accounted for as in tuning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.online.bandit import Decision, OnlineTuner
from tuner.online.promise import SURE, available_s
from tuner.online.response import POWER
from tuner.online.windows import Chunk

#: Distance that is kept below the target, and the least gain for which a faster setting is entered,
#: in log power.
MARGIN, WORTH = 0.006, 0.004
#: Share of the log power between two measured settings that is added in the middle between them,
#: and less towards each: until a setting is measured, it is taken for one that draws more.
BEND = 0.1
#: Chunks that a mean power remembers.
MEMORY = 30
#: Steepest exponent of the power by the clock, by which an unmeasured higher clock is judged.
STEEP = 3.0
#: Slowdown that stands for no limit.
UNLIMITED = 1e6
#: Windows that the budget must allow for before the highest setting is left.
ENTER = 4
#: Periods of a constant target that are kept.
PERIODS = 10_000

#: Why the target is not met: it is below what the job can draw, above what it may, or the budget of
#: slowdown is spent.
Unmet = Literal["", "low", "high", "budget"]

#: What is said of a target that is not met.
UNMET = {
    "low": "is less than the job can draw: it runs at the lowest clock",
    "high": "is more than the job draws: it runs at the highest clock",
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
        budget: slowdown of the whole run that is allowed; None: any.

    Attributes:
        target_W: what may be drawn, by the meter's scope; None: no limit.
        periods: what was asked and delivered, in order.
        unmet: why the target is not met.
    """

    def __init__(
        self, x: Sequence[float], *, budget: float | None, window_s: float, settle_s: float
    ) -> None:
        most = UNLIMITED if budget is None else budget
        super().__init__(x, max_slowdown=most, window_s=window_s, settle_s=settle_s)
        self.target_W: float | None = None
        self.periods: list[Period] = []
        self.unmet: Unmet = ""
        self._limited = budget is not None
        self._known: dict[int, tuple[float, int]] = {}  # mean log power and number of chunks
        self._fresh_s = 0.0

    def add(self, chunk: Chunk) -> Decision:
        """Add whole steps that ran at the decided setting; return the decision for the next."""
        setting, stalled_s = self.decision.setting, self.stalled_s
        self._record(chunk)
        super().add(chunk)
        if self._fresh_s > 0:
            self._fresh_s -= chunk.seconds
        elif self.stalled_s == stalled_s and chunk.energy_J > 0:
            self._observe(setting, math.log(chunk.energy_J / chunk.seconds))
        self._go(self._decide())
        if self.decision.setting != setting:
            self._fresh_s = self._settle_s
        return self.decision

    def _record(self, chunk: Chunk) -> None:
        last = self.periods[-1] if self.periods else None
        if last is None or (last.target_W != self.target_W and len(self.periods) < PERIODS):
            last = Period(self.target_W)
            self.periods.append(last)
        last.seconds += chunk.seconds
        last.energy_J += chunk.energy_J
        if self.target_W is not None and chunk.energy_J > self.target_W * chunk.seconds:
            last.beyond_s += chunk.seconds

    def _observe(self, setting: int, log_W: float) -> None:
        mean, count = self._known.get(setting, (log_W, 0))
        change = (log_W - mean) / (min(count, MEMORY) + 1)
        self._known[setting] = mean + change, count + 1
        if count >= MEMORY / 2:  # what changes here changes the other settings, too
            for each, (other, times) in self._known.items():
                if each != setting:
                    self._known[each] = other + change, times

    def _expected(self, setting: int) -> float:
        """Return the log power expected of a setting, on the safe side if it was not measured."""
        if setting in self._known:
            return self._known[setting][0]
        faster = [each for each in self._known if each < setting]
        slower = [each for each in self._known if each > setting]
        x = self._x
        if faster and slower:
            a, b = max(faster), min(slower)
            of_a, of_b = self._known[a][0], self._known[b][0]
            share = (x[setting] - x[a]) / (x[b] - x[a])
            bend = 4 * share * (1 - share) * BEND
            return of_a + share * (of_b - of_a) + bend * abs(of_b - of_a)
        if faster:
            last = max(faster)
            return self._known[last][0] + POWER.exponent * (x[setting] - x[last])
        first = min(slower)
        return self._known[first][0] + STEEP * (x[first] - x[setting])

    def _decide(self) -> Decision:
        """Return the fastest setting within the target, or the highest if the budget is spent."""
        usable = sorted({*self._settings} - self._barred)
        if self.target_W is None or not self._known:
            self.unmet = ""
            return Decision(0, "choice")
        here, most = self.decision.setting, math.log(self.target_W) - MARGIN
        worth = (WORTH if each < here else 0.0 for each in usable)
        fits = [
            i for i, more in zip(usable, worth, strict=True) if self._expected(i) + more <= most
        ]
        wanted = min(fits) if fits else usable[-1]
        low = not fits and usable[-1] in self._known
        high = wanted == 0 and self._expected(0) < most - 5 * MARGIN
        self.unmet = "low" if low else "high" if high else ""
        if wanted and self._limited and not self._affordable(wanted):
            self.unmet = "budget"
            return Decision(0, "choice")
        return Decision(wanted, "choice")

    def _affordable(self, setting: int) -> bool:
        views = self._views()
        total = self._total(self._earlier_sure, SURE, views)
        left_s = available_s(total.seconds, total.lost_s[2], self.max_slowdown)
        # From the highest setting it is entered only for some time, and not for a moment.
        windows = ENTER if self.decision.setting == 0 else 1
        return self._loss_s(views, setting, windows) <= max(0.0, left_s)
