"""Drift within a probe: the difference of two visits of one live setting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.search_spaces.configuration import Settings

if TYPE_CHECKING:
    from tuner.workload.probe import Measurement

__all__ = ["Drift"]


@dataclass(frozen=True)
class Drift:
    """Difference of one live setting's two visits in one probe, an effect of warming up.

    Attributes:
        live: the setting that was visited twice.
        apart_s: from the first window's opening to the second's, seconds.
        step_time: relative change of the step time from the first to the second (0.01 is 1 %).
        step_time_se: its standard error.
        power: relative change of the power.
        power_se: its standard error; NaN if a window's is unknown.
        temperature_C: change of the hottest device's temperature; None if unknown.
    """

    live: Settings
    apart_s: float
    step_time: float
    step_time_se: float
    power: float
    power_se: float = math.nan
    temperature_C: float | None = None

    @classmethod
    def between(cls, first: Measurement, second: Measurement) -> Drift:
        """Compute the drift from one visit of a setting to a later one."""

        def relative(name: str, error: str) -> tuple[float, float]:
            ratio = getattr(second, name) / getattr(first, name)
            return ratio - 1, ratio * math.hypot(getattr(first, error), getattr(second, error))

        warmer = None
        if first.temperature_C is not None and second.temperature_C is not None:
            warmer = second.temperature_C - first.temperature_C
        return cls(
            first.live,
            second.started_s - first.started_s,
            *relative("step_time_s", "step_time_rse"),
            *relative("power_W", "power_rse"),
            temperature_C=warmer,
        )

    @property
    def notable(self) -> bool:
        """More than 1 % and more than twice its error, in step time or in power."""
        pairs = ((self.step_time, self.step_time_se), (self.power, self.power_se))
        return any(abs(change) > max(0.01, 2 * se) for change, se in pairs if se == se)

    @property
    def sentence(self) -> str:
        """The drift as a phrase for people."""
        heat = f" and {self.temperature_C:+.0f} C" if self.temperature_C is not None else ""
        return (
            f"{self.live.short} visited again after {self.apart_s:.0f} s{heat}: step time "
            f"{100 * self.step_time:+.1f} %, power {100 * self.power:+.1f} %"
        )
