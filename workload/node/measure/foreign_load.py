"""Windows while others used the devices, whose figures are much less certain.

Processes that take a share s of the cores can make steps take up to 1 / (1 - s) times as long, by
how much nobody knows: two windows that were disturbed differently say little of their difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tuner.workload.node.host import CONTENTION_SHARE
from tuner.workload.records.probe import Measurement

#: Relative error of a window in which another process used a device, whose share is not known: as
#: of half of it.
DEVICE_ERROR = math.log(2)
#: Nothing is slowed down by more than this share of the cores.
MOST = 0.95


@dataclass(frozen=True)
class ForeignLoad:
    """Use of the devices by others during a window.

    Attributes:
        share: of the cores.
        device: phrase on another process on a device; empty without one.
    """

    share: float = 0.0
    device: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Phrases on the use of the devices by others; empty if too little to matter."""
        cores = f"other processes used {self.share:.0%} of the cores meanwhile"
        return (*([cores] if self.share > CONTENTION_SHARE else []), *filter(None, [self.device]))

    @property
    def error(self) -> float:
        """Relative standard error that it adds to step time and power."""
        cores = -math.log(1 - min(self.share, MOST)) if self.share > CONTENTION_SHARE else 0.0
        return math.hypot(cores, DEVICE_ERROR if self.device else 0.0)

    def widened(self, measured: Measurement) -> Measurement:
        """Return the measurement with the errors that the load adds."""
        if not (error := self.error):
            return measured

        def wider(se: float, value: float) -> float:
            return math.hypot(0.0 if math.isnan(se) else se, error * value)

        return replace(
            measured,
            step_time_se_s=wider(measured.step_time_se_s, measured.step_time_s),
            power_se_W=wider(measured.power_se_W, measured.power_W),
        )
