"""Windows of whole optimizer steps at one live setting, apart from evaluation, checkpoints, stalls.

The training is observed in chunks: a few whole steps between two readings of the energy counter. A
chunk in which something other than steps took time is no measurement of the setting; its time and
energy still count towards the totals of the run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

#: A chunk is stalled if its mean step takes this many times the usual one, or is further above it
#: than this many median deviations, whichever is more.
STALL, DEVIATIONS = 1.25, 8.0
#: From this number of consecutive chunks on, a longer step is the new usual one and no stall.
NEW_USUAL = 6
#: Number of chunks whose median is the usual step time.
MEMORY = 15


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
    """Collection of the chunks of one setting into windows.

    Args:
        window_s: least measured time of a window, seconds.
        settle_s: time after a switch that is not measured, seconds.
    """

    def __init__(self, window_s: float, settle_s: float) -> None:
        self._window_s, self._settle_s = window_s, settle_s
        self.stalled_s = 0.0  # time of stalled chunks beyond their usual steps
        self.switch(0, math.inf)

    def switch(self, setting: int, longest_s: float, patience: int = NEW_USUAL) -> None:
        """Begin anew under a setting; what was not yet a window is dropped.

        Args:
            longest_s: the step time, seconds, that is expected of it at most.
            patience: number of longer chunks in a row from which on they are no stall.
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
