"""Windows of whole optimizer steps at one live setting, and changes that they reveal.

The training is observed in chunks: a few whole steps between two readings of the energy counter. A
chunk in which something other than steps took time (evaluation, a checkpoint, a stall) is no
measurement of the setting; its time and energy still count towards the totals of the run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

#: A chunk is stalled if its mean step takes this many times the usual one, or is further above it
#: than this many median deviations, whichever is more.
STALL, DEVIATIONS = 1.25, 8.0
#: From this number of consecutive chunks on, a longer step is the new usual one and no stall.
NEW_USUAL = 6
#: Number of chunks whose median is the usual step time.
MEMORY = 15
#: Page's test (1954), in standard deviations: its reference value and limit, and what a residual
#: counts at most, so that one odd window is no change and two clear ones are.
REFERENCE, LIMIT, MOST = 1.0, 4.0, 3.0
#: Relative change that is not worth a restart, added to the standard deviation of a residual.
TOLERANCE = 0.003
#: A change is reported from this mean relative size on.
LEAST = 0.01

Quantity = Literal["step time", "power"]


@dataclass(frozen=True)
class Chunk:
    """A few whole optimizer steps in a row at one setting."""

    steps: int
    seconds: float
    energy_J: float

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, seconds."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Window:
    """Mean step time and power of whole steps at one setting, by its index."""

    setting: int
    steps: int
    step_time_s: float
    power_W: float


class WindowCollector:
    """Collection of the chunks of one setting into windows of at least `window_s`, seconds, from
    `settle_s` after a switch on."""

    def __init__(self, window_s: float, settle_s: float) -> None:
        self._window_s, self._settle_s = window_s, settle_s
        self.stalled_s = 0.0  # time of stalled chunks beyond their usual steps
        self.switch(0, math.inf)

    def switch(self, setting: int, longest_s: float, patience: int = NEW_USUAL) -> None:
        """Begin anew under a setting whose steps are expected to take `longest_s` at most; after
        `patience` longer chunks in a row they are not a stall.
        """
        self._patience = patience
        self._setting, self._left_s, self._longest_s = setting, self._settle_s, longest_s
        self._usual: deque[float] = deque(maxlen=MEMORY)
        self._long: list[Chunk] = []
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> Window | None:
        """Add a chunk; return the window that it completes, or None."""
        if self._left_s > 0:
            self._left_s -= chunk.seconds
            return None
        if self._stalls(chunk):
            self._long.append(chunk)
            if len(self._long) < self._patience:
                usual_s = statistics.median(self._usual) if self._usual else self._longest_s
                self.stalled_s += chunk.seconds - chunk.steps * usual_s
                return None
            # Not a stall: steps take longer from here on.
            self._usual.clear()
            self._longest_s = max(each.step_time_s for each in self._long)
            self._chunks = self._long[:]
        else:
            self._chunks.append(chunk)
        self._long = []
        self._usual.append(chunk.step_time_s)
        seconds = sum(each.seconds for each in self._chunks)
        if seconds < self._window_s:
            return None
        steps = sum(each.steps for each in self._chunks)
        energy_J = sum(each.energy_J for each in self._chunks)
        self._chunks = []
        if energy_J <= 0:  # the counter stood still
            return None
        return Window(self._setting, steps, seconds / steps, energy_J / seconds)

    def _stalls(self, chunk: Chunk) -> bool:
        if len(self._usual) < 3:
            return chunk.step_time_s > STALL * self._longest_s
        usual_s = statistics.median(self._usual)
        deviation_s = statistics.median(abs(each - usual_s) for each in self._usual)
        return chunk.step_time_s > max(STALL * usual_s, usual_s + DEVIATIONS * deviation_s)


@dataclass(frozen=True)
class Change:
    """Change of the job or the machine at a constant setting, from window number `since` on."""

    quantity: Quantity
    since: int
    relative: float  # its estimated size; 0.2 is 20 % more
    step: int = 0  # number of steps done when it was noticed


class ChangeDetector:
    """Detector of changes in one quantity: two-sided cumulative sums of standardised residuals."""

    def __init__(self, quantity: Quantity) -> None:
        self._quantity = quantity
        self.reset()

    def reset(self) -> None:
        """Forget the residuals so far."""
        # Of each side, the windows of its present sum: number, summand, residual.
        self._sides: dict[int, list[tuple[int, float, float]]] = {1: [], -1: []}

    def add(self, number: int, residual: float, deviation: float) -> Change | None:
        """Add log(measured / predicted) of a window; return the change that it reveals, or None.

        `deviation` is its standard deviation, prediction and noise together.
        """
        standard = residual / math.hypot(deviation, TOLERANCE)
        for sign, side in self._sides.items():
            side.append((number, min(sign * standard, MOST) - REFERENCE, sign * residual))
            (since, *_), total = side[0], sum(summand for _, summand, _ in side)
            mean = statistics.fmean(each for _, _, each in side)
            if total <= 0:
                side.clear()
            elif total >= LIMIT and mean >= LEAST:
                return Change(self._quantity, since, math.expm1(sign * mean))
        return None
