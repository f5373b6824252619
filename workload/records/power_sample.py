"""A point of the power timeline of a probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PowerSample:
    """Point of the power timeline: the power of all devices together, watts.

    `extra` holds means over them of "clock_MHz", "utilisation", ..., the hottest "temperature_C".
    """

    time_s: float
    power_W: float
    extra: Mapping[str, float] = field(default_factory=dict)
