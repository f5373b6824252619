"""Predicted cost of a probe in joules, which its worth is compared with, and its time limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.limits import ProbeLimits, limits_of
from tuner.workload.records.probe import ProbeRecord, WindowPolicy

if TYPE_CHECKING:
    from tuner.models.prior import Prior


@dataclass(frozen=True)
class ProbeCost:
    """Predicted cost of probes.

    Attributes:
        launch_s: from the request to the first measured step, seconds.
        settle_s: at a new live setting before its window opens, seconds.
        launch_power: power during the launch, as a share of the configuration's own.
        min_steps: smallest number of steps of a window.
    """

    launch_s: float = 30.0
    settle_s: float = 1.0
    window_s: float = 5.0
    launch_power: float = 0.5
    min_steps: int = 0

    def learned(self, records: Sequence[ProbeRecord]) -> ProbeCost:
        """Return the costs with the median length and power of the launches that measured.

        A launch is all of a probe but its windows, what was settled before them, and compilation,
        which other launches do not need.
        """
        lengths, powers = [], []
        for record in records:
            windows = record.measurements
            if not record.ok or not windows:
                continue
            settled_s = [self.settle_s if m.live else 0.0 for m in windows]
            length_s = record.wall_s - math.fsum(m.window_s for m in windows) - sum(settled_s)
            joules = record.energy_J - math.fsum(
                m.energy_J + s * m.power_W for m, s in zip(windows, settled_s, strict=True)
            )
            if length_s > 0 and joules > 0:
                lengths.append(max(0.0, length_s - record.compilation_s))
                powers.append(joules / (length_s * windows[0].power_W))
        if not lengths:
            return self
        return replace(
            self, launch_s=statistics.median(lengths), launch_power=statistics.median(powers)
        )

    def launch_J(self, power_W: np.ndarray) -> np.ndarray:
        """Joules of the launch of configurations that draw `power_W`."""
        return np.asarray(self.launch_s * self.launch_power * power_W)

    def visit_J(self, power_W: np.ndarray, step_time_s: np.ndarray) -> np.ndarray:
        """Joules of settling at a live setting and measuring it."""
        window = np.maximum(self.window_s, self.min_steps * step_time_s)
        return np.asarray((self.settle_s + window) * power_W)


def probe_limits(
    job: TrainingJob | None,
    prior: Prior | None,
    configurations: Sequence[Configuration],
    window: WindowPolicy,
    *,
    visits: int = 1,
    **limits_s: float | None,
) -> ProbeLimits:
    """Return the limits of a probe of these configurations (`limits_of`)."""
    step = math.nan if prior is None else float(prior.predict(configurations).step_time_s.max())
    inspected = job.first_step_s if job is not None else 0.0
    return limits_of(
        window, visits=visits, predicted_step_s=step, inspected_s=inspected, **limits_s
    )
