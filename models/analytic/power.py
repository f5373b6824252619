"""Power of a device: idle, clock- and voltage-dependent compute, memory and links.

Arithmetic costs V(f)^2 f while it runs, so a fixed amount of it costs energy as V(f)^2. Memory and
links draw power while they move data, at any SM clock. While a device waits for others, the kernels
of the communication library spin, which costs V(f)^2 f as well. A device whose power would exceed
its limit lowers its clock until it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.search_spaces.cluster import Device

#: Lowest clock that a power limit is taken to reach, as a share of the highest, and the number of
#: bisections that find the clock under a limit.
LOWEST_CLOCK, BISECTIONS = 0.1, 14


@dataclass(frozen=True)
class Busy:
    """Seconds of a span in which each part of a device is busy; arrays of one shape."""

    arithmetic_s: np.ndarray  # full-rate arithmetic, counted at the highest clock
    memory_s: np.ndarray
    link_s: np.ndarray
    host_link_s: np.ndarray
    wait_s: np.ndarray  # waiting for other devices, by kernels that spin


class PowerModel:
    """Power model of one device."""

    def __init__(self, device: Device, constants: Constants) -> None:
        self.device, self.constants = device, constants
        self._reference_W = constants.reference_W or device.max_W - device.idle_W

    def voltage(self, clock: np.ndarray) -> np.ndarray:
        """Return the voltage at a clock, shares of the highest: flat to the knee, then linear."""
        knee, lowest = self.constants.voltage_knee, self.constants.lowest_voltage
        rise = np.clip((clock - knee) / (1 - knee), 0.0, None)
        return np.asarray(lowest + (1 - lowest) * rise)

    def energies_J(
        self, busy: Busy, clock: np.ndarray, span_s: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the joules of one device over a span, by part."""
        c, reference = self.constants, self._reference_W
        squared = self.voltage(clock) ** 2
        return {
            "idle": self.device.idle_W * span_s,
            "awake": c.awake_W * reference * squared * clock * span_s,
            "arithmetic": c.compute_W * reference * squared * busy.arithmetic_s,
            "memory": c.memory_W * reference * busy.memory_s,
            "links": c.link_W * reference * busy.link_s,
            "host link": c.host_link_W * reference * busy.host_link_s,
            "waiting": c.wait_W * reference * squared * clock * busy.wait_s,
        }

    def watts(self, busy: Busy, clock: np.ndarray, span_s: np.ndarray) -> np.ndarray:
        """Return the average watts of one device over a span."""
        return np.asarray(sum(self.energies_J(busy, clock, span_s).values()) / span_s)
