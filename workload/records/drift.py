"""Difference of two visits of one live setting in a probe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.search_spaces.configuration import Settings


@dataclass(frozen=True)
class Drift:
    """Difference of one live setting's two visits in one probe, an effect of warming up.

    Changes are relative (0.01 is 1 %), `apart_s` is seconds between openings; errors are NaN and
    `temperature_C`, of the hottest device, None if unknown.
    """

    live: Settings
    apart_s: float
    step_time: float
    step_time_se: float
    power: float = math.nan
    power_se: float = math.nan
    temperature_C: float | None = None

    @property
    def notable(self) -> bool:
        """More than 1 % and more than twice its error, in step time or in power."""
        pairs = ((self.step_time, self.step_time_se), (self.power, self.power_se))
        return any(abs(change) > max(0.01, 2 * se) for change, se in pairs if se == se)

    @property
    def sentence(self) -> str:
        """The drift as a phrase for people."""
        heat = f" and {self.temperature_C:+.0f} C" if self.temperature_C is not None else ""
        power = "" if math.isnan(self.power) else f", power {100 * self.power:+.1f} %"
        return (
            f"{self.live.short} visited again after {self.apart_s:.0f} s{heat}: step time "
            f"{100 * self.step_time:+.1f} %{power}"
        )
