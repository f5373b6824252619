"""Time limits of a probe: to its first step, from step to step, and as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.workload.probe import ProbeRequest, WindowPolicy

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


@dataclass(frozen=True)
class ProbeLimits:
    """Time limits of one probe, seconds; of the first step from the start of the ranks."""

    first_step_s: float = FIRST_STEP_LIMIT_S
    step_s: float = STEP_LIMIT_S
    probe_s: float = PROBE_LIMIT_S

    @classmethod
    def of_request(cls, request: ProbeRequest, step_limit_s: float | None = None) -> ProbeLimits:
        """Return the limits of a request; `step_limit_s` replaces those of the steps."""
        return cls(
            step_limit_s or request.first_step_limit_s or FIRST_STEP_LIMIT_S,
            step_limit_s or request.step_limit_s or STEP_LIMIT_S,
            request.time_limit_s,
        )


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
