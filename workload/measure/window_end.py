"""End of a window: its errors are small enough, its time is up, or its configuration is beaten.

A window whose configuration is shown to be slower and to take more energy than one that is known
already ends before. The test is Student's t, because a short window knows its own scatter badly, on
both axes at once. Ending by mistake costs precision alone: mean and error are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from tuner.workload.measure.statistics import Window, block_edges, block_powers, standard_error
from tuner.workload.probe import WindowPolicy

#: A window may end from here on. NVML counters update about every 100 ms, and windows under 2 s
#: read low (docs/measuring.md).
FIRST_LOOK_S = 2.0
#: Each further look comes when the window is this many times as long.
LOOK_FACTOR = 1.5
#: Probability with which one look finds one axis behind that lies exactly `FAR` behind. A window of
#: 2 to 15 s has at most six looks, and both axes have to be behind.
LOOK_RISK = 0.05
#: A configuration is beaten if it is this far behind the upper ends of a known one on both axes:
#: launches of one configuration differ by 1 to 3 %, which one window cannot see.
FAR = 0.02


#: Step time (s) and energy of a step (J) that a known configuration reaches, at the upper ends of
#: their intervals.
Reached = tuple[float, float]


@dataclass(frozen=True)
class _Mean:
    value: float
    rse: float
    freedom: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> _Mean:
        """Return the mean of a series; its error is `standard_error`."""
        series = np.asarray(values, dtype=float)
        error = standard_error(series)
        if math.isnan(error) or series.mean() <= 0:
            return cls(math.nan, math.nan, 0.0)
        # The number of independent values that would have this error.
        count = float(series.var(ddof=1)) / error**2 if error else float(series.size)
        return cls(float(series.mean()), error / float(series.mean()), max(count - 1.0, 1.0))


def _means(window: Window) -> tuple[_Mean, _Mean]:
    """Return the means of step time and of power, as far as the window has come."""
    edges = block_edges(window.opened.time_s, window.ends_s)
    return _Mean.of(window.step_times_s), _Mean.of(block_powers(window.samples, edges))


def beaten_by(window: Window, known: Sequence[Reached]) -> Reached | None:
    """Return a known configuration that beats the window's on both axes, or None.

    The lower ends (`LOOK_RISK`) must be more than `FAR` above the known ones.
    """
    time, power = _means(window)
    if math.isnan(time.rse) or math.isnan(power.rse):
        return None
    both = min(time.freedom, power.freedom)
    low_s = time.value * math.exp(-_quantile(time.freedom) * time.rse)
    low_J = time.value * power.value
    low_J *= math.exp(-_quantile(both) * math.hypot(time.rse, power.rse))
    return ahead_of(low_s, low_J, known)


def ahead_of(low_s: float, low_J: float, known: Sequence[Reached]) -> Reached | None:
    """Return a known configuration that these lower ends are `FAR` behind on both axes, or None."""
    far = 1.0 + FAR
    return next((each for each in known if low_s > far * each[0] and low_J > far * each[1]), None)


def _quantile(freedom: float) -> float:
    """Return the quantile of Student's t that a look uses."""
    return float(stdtrit(freedom, 1.0 - LOOK_RISK))


def missing_s(policy: WindowPolicy, window: Window, known: Sequence[Reached] = ()) -> float:
    """Return the seconds that a window still lacks to its target error; 0 if it is complete."""
    length_s = window.length_s
    enough = len(window.step_times_s) >= policy.min_steps
    least_s = min(FIRST_LOOK_S, policy.min_s) if known else policy.min_s
    if length_s < least_s or not enough:
        # 2 % more than asked, so that slightly fast steps do not cost another boundary.
        return max((least_s - length_s) * 1.02, 1e-3)
    if length_s >= policy.max_s or beaten_by(window, known):
        return 0.0
    next_look_s = (LOOK_FACTOR - 1.0) * length_s if known else math.inf
    if length_s < policy.min_s:
        return min((policy.min_s - length_s) * 1.02, next_look_s)
    excess = max(
        (mean.rse / policy.target_se for mean in _means(window) if not math.isnan(mean.rse)),
        default=0.0,
    )
    if excess <= 1.0:
        return 0.0
    # The error falls with the root of the length: go half of the way that this promises, then look.
    promised_s = length_s * (excess**2 - 1) / 2
    return min(promised_s, policy.max_s - length_s, policy.min_s, next_look_s)
