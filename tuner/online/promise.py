"""Account of the promise: the time lost against the run at the highest setting, and what is left.

Time spent below the highest setting is longer than the same steps would have taken there by the
factor exp(f), f the logarithm of the step time ratio, so of `t` seconds t (1 - exp(-f)) are lost.
f is uncertain; the promise is kept on its upper end. The run may end after any step, so the loss so
far must at all times be within the slowdown that the time so far allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import add

from tuner.online.response import Views

#: Slowdown that stands for no limit.
UNLIMITED = 1e6
#: Standard deviations to the upper end: one-sided 95 % is 1.64; the rest covers the model.
SURE = 2.0
#: Share of the allowance that is kept in reserve.
RESERVE = 0.05


@dataclass
class Spent:
    """Time and energy at each setting of one epoch, by setting.

    Attributes:
        tried_J: energy of windows that were run to learn, by setting.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    energy_J: dict[int, float] = field(default_factory=dict)
    tried_J: dict[int, float] = field(default_factory=dict)

    def add(self, setting: int, seconds: float, energy_J: float, *, trial: bool) -> None:
        """Add a chunk of the run."""
        tried_J = {setting: energy_J} if trial else {}
        self.take(Spent({setting: seconds}, {setting: energy_J}, tried_J))

    def take(self, other: Spent) -> None:
        """Add all of another account."""
        for name, mine in vars(self).items():
            for setting, value in getattr(other, name).items():
                mine[setting] = mine.get(setting, 0.0) + value


@dataclass(frozen=True)
class Balance:
    """Loss and saving against the run at the highest setting; an estimate and its 90 % interval.

    Attributes:
        seconds, energy_J: of the run.
        lost_s, saved_J: (low, estimate, high).
        exploring_J: energy of windows run to learn, beyond the same steps at the chosen setting.
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


def balance(spent: Spent, views: Views, chosen: int, sure: float) -> Balance:
    """Return the balance of an epoch; `sure` is the number of standard deviations of its ends."""
    lost, saved = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for setting, seconds in spent.seconds.items():
        if setting == 0:
            continue
        slow, slow_sd = views.time.relative(setting)
        energy, energy_sd = views.energy(setting)
        for end, side in enumerate((-sure, 0.0, sure)):
            lost[end] += seconds * -math.expm1(-(slow + side * slow_sd))
            more = math.expm1(min(-(energy - side * energy_sd), 5.0))
            saved[end] += spent.energy_J[setting] * more
    here = views.energy(chosen)[0]
    exploring_J = sum(
        max(0.0, -energy_J * math.expm1(here - views.energy(setting)[0]))
        for setting, energy_J in spent.tried_J.items()
    )
    seconds, energy_J = (sum(each.values()) for each in (spent.seconds, spent.energy_J))
    return Balance(seconds, energy_J, tuple(lost), tuple(saved), exploring_J)


def available_s(seconds: float, lost_s: float, max_slowdown: float) -> float:
    """Return the time that may still be lost, seconds, after `seconds` of which `lost_s` are lost.

    The allowance is `max_slowdown` of the time at the highest setting, seconds - lost_s.
    """
    return (1 - RESERVE) * max_slowdown * (seconds - lost_s) - lost_s
