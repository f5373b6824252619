"""Time limits of a probe of a job, from its prediction and the inspection of its script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.limits import ProbeLimits, limits_of
from tuner.workload.probe import WindowPolicy
from tuner.workload.scripts.script_job import ScriptJob

if TYPE_CHECKING:
    from tuner.models.analytic.model import Prior


def inspected_s(job: TrainingJob | None) -> float:
    """Return the seconds that the inspection of a script took to its first step; 0 without one."""
    return job.frame.first_step_s if isinstance(job, ScriptJob) else 0.0


def probe_limits(
    job: TrainingJob | None,
    prior: Prior | None,
    configurations: Sequence[Configuration],
    window: WindowPolicy,
    *,
    visits: int = 1,
    **limits_s: float | None,
) -> ProbeLimits:
    """Return the limits of a probe of these configurations (`tuner.workload.limits.limits_of`)."""
    step = math.nan if prior is None else float(prior.predict(configurations).step_time_s.max())
    inspected = inspected_s(job)
    return limits_of(
        window, visits=visits, predicted_step_s=step, inspected_s=inspected, **limits_s
    )
