"""Limits of a probe: length and precision of its windows, and the time that it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tuner.search_spaces.options import check_options, option

#: A step that takes longer than this is a hang, unless longer steps are predicted.
STEP_LIMIT_S = 120.0
#: Time to the first step in an inspection, and at least in every probe: it may import, compile and
#: load a checkpoint.
FIRST_STEP_LIMIT_S = 300.0
#: A look at a script ends after a further step that takes as long as this, seconds.
LONG_STEP_S = 60.0
#: A probe as a whole, if no more is predicted.
PROBE_LIMIT_S = 300.0
#: A step may take so many times what is predicted, a launch what the inspection took.
STEP_MARGIN, LAUNCH_MARGIN = 10.0, 3.0
#: Steps of a launch before its first window: warm-up, settling.
STEPS_BEFORE = 5
#: A window that is measured to `WindowPolicy.search_se` may be this short, seconds; NVML counters
#: update about every 100 ms and read low in windows under 2 s (docs/measuring.md).
SEARCH_MIN_S = 3.0


@dataclass(frozen=True)
class WindowPolicy:
    """Length and precision of the measurement of a live setting."""

    #: 5 s are stable on NVML (ML.ENERGY blog; see docs/measuring.md).
    min_s: float = option(5.0, "shortest window", unit="s", least=0)
    min_steps: int = option(3, "smallest number of whole optimizer steps in a window", least=0)
    max_s: float = option(
        15.0, "end the window after this even if the target is missed", unit="s", least=0
    )
    target_se: float = option(
        0.01, "relative standard error of step time and of power that ends the window", least=0
    )
    settle_s: float = option(
        1.0, "run at a new live setting before the window opens", unit="s", least=0
    )
    idle_s: float = option(
        0.3, "measure the idle power before the ranks start; 0 for not at all", unit="s", least=0
    )
    check_drift: bool = option(
        True, "with several live settings, visit the first one again at the end"
    )
    search_se: float = option(
        0.05,
        "relative standard error that ends a window of the search",
        least=0,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def rough(self) -> WindowPolicy:
        """The policy of a measurement to `search_se`; this one where that is no less precise."""
        if self.search_se <= self.target_se:
            return self
        return replace(self, min_s=min(self.min_s, SEARCH_MIN_S), target_se=self.search_se)


@dataclass(frozen=True)
class ProbeLimits:
    """Time limits of one probe, seconds; of the first step from the start of the ranks."""

    first_step_s: float = FIRST_STEP_LIMIT_S
    step_s: float = STEP_LIMIT_S
    probe_s: float = PROBE_LIMIT_S


def limits_of(
    window: WindowPolicy,
    *,
    visits: int = 1,
    predicted_step_s: float = math.nan,
    inspected_s: float = 0.0,
    first_step_s: float | None = None,
    step_s: float | None = None,
    probe_s: float | None = None,
) -> ProbeLimits:
    """Return a probe's limits; those that the user set are taken as they are."""
    step = 0.0 if math.isnan(predicted_step_s) else predicted_step_s
    longest_step_s = max(STEP_LIMIT_S, STEP_MARGIN * step) if step_s is None else step_s
    if first_step_s is None:
        longer_s = max(0.0, longest_step_s - STEP_LIMIT_S)
        first_step_s = max(FIRST_STEP_LIMIT_S + longer_s, LAUNCH_MARGIN * inspected_s)
    if probe_s is None:
        # Windows may take three times what is predicted.
        each_s = window.settle_s + max(window.max_s, 3 * (window.min_steps + 1) * step)
        probe_s = first_step_s + 3 * STEPS_BEFORE * step + (visits + 1) * each_s
    return ProbeLimits(first_step_s, longest_step_s, probe_s)
