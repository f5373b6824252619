"""Account of the promise: the time lost against the run at the highest setting, and what is left.

Time spent below the highest setting is longer than the same steps would have taken there by the
factor exp(f), f the logarithm of the step time ratio, so of `t` seconds t (1 - exp(-f)) are lost.
f is uncertain; the promise is kept on its upper end. The run may end after any step, so the loss so
far must at all times be within the slowdown that the time so far allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add

import numpy as np

from tuner.online.response import Array, Views

#: Slowdown that stands for no limit.
UNLIMITED = 1e6
#: Standard deviations to the upper end: one-sided 95 % is 1.64; the rest covers the model.
SURE = 2.0
#: Share of the allowance that is kept in reserve.
RESERVE = 0.05


@dataclass(frozen=True)
class Balance:
    """Loss and saving against the run at the highest setting; an estimate and its 90 % interval.

    `exploring_J` is of windows run to learn, beyond that of the same steps at the chosen setting.
    """

    seconds: float = 0.0
    energy_J: float = 0.0
    lost_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    saved_J: tuple[float, ...] = (0.0, 0.0, 0.0)
    exploring_J: float = 0.0

    def __add__(self, other: Balance) -> Balance:
        # Ends are added as if all errors had one cause, which is the wider interval.
        return Balance(
            self.seconds + other.seconds,
            self.energy_J + other.energy_J,
            tuple(map(add, self.lost_s, other.lost_s)),
            tuple(map(add, self.saved_J, other.saved_J)),
            self.exploring_J + other.exploring_J,
        )

    @property
    def slowdown(self) -> tuple[float, ...]:
        """Slowdown of the run: (low, estimate, high)."""
        return tuple(lost_s / max(self.seconds - lost_s, 1e-9) for lost_s in self.lost_s)


def balance(spent: Array, views: Views, chosen: int, sure: float) -> Balance:
    """Return the balance of an epoch, whose ends are `sure` standard deviations off.

    `spent`, of shape (3, settings), is time, energy and the part of it in windows run to learn.
    """
    lost, saved, exploring_J = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0
    here = views.energy(chosen)[0]
    for setting in np.flatnonzero(spent[0]).tolist():
        seconds, energy_J, tried_J = map(float, spent[:, setting])
        slow, slow_sd = views.time.relative(setting)
        energy, energy_sd = views.energy(setting)
        for end, side in enumerate((-sure, 0.0, sure)):
            # To be faster than at the highest setting earns nothing: it may be a phase of the job.
            least = 0.0 if side > 0 else -math.inf
            lost[end] += seconds * max(least, -math.expm1(-(slow + side * slow_sd)))
            saved[end] += energy_J * math.expm1(min(-(energy - side * energy_sd), 5.0))
        exploring_J += max(0.0, -tried_J * math.expm1(here - energy))
    total_s, total_J = map(float, spent[:2].sum(1))
    return Balance(total_s, total_J, tuple(lost), tuple(saved), exploring_J)


def available_s(seconds: float, lost_s: float, max_slowdown: float) -> float:
    """Return the time that may still be lost, seconds, after `seconds` of which `lost_s` are lost.

    The allowance is `max_slowdown` of the time at the highest setting, seconds - lost_s.
    """
    return (1 - RESERVE) * max_slowdown * (seconds - lost_s) - lost_s
