"""Power limits that seem not to bind: the other ones of such a launch are probed last.

A power limit well above what the devices draw changes nothing, unless they work in bursts, which
the mean power hides. A limit is judged by a window of its launch at a higher one: power that was
drawn without it. So each limit that seems not to bind has a chance to differ all the same, which
falls with each pair of windows that agree where they should and is 1 once a pair does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.models.surrogate.surrogates import POWER_NOISE, TIME_NOISE
from tuner.search.observations import Observation
from tuner.search_spaces.configuration import Configuration, Settings

#: A limit seems not to bind if it exceeds the mean power of a device by this factor. The mean hides
#: bursts: above it limits still lower the power of librispeech on both devices of zeus-nsdi23.
SLACK = 1.3
#: Probability that a rule which puts candidates last is wrong, before anything speaks for it; each
#: observation that does multiplies it again. An assumption: nothing was fitted.
DOUBT = 0.3
#: Standard errors by which windows differ, and that are added to power.
ERRORS = 3.0
#: Windows agree only if their ratio, of time or power, is known to this (`ERRORS` of its errors).
AGREE = 0.1
POWER_LIMIT = "power_limit_W"


class SlackLimits:
    """Candidates that probably equal a measured one, because neither's power limit binds.

    Attributes:
        notes: sentences for the user: which limits are probed last, and which windows contradict.
    """

    def __init__(self, configurations: Sequence[Configuration], launch_of: np.ndarray) -> None:
        self._configurations, self.notes = configurations, list[str]()
        self._limits_W = np.array([_limit_W(one) for one in configurations])
        numbers: dict[tuple[int, Settings], int] = {}
        # Candidates with the same number differ in their power limit only.
        each = [
            (launch, _others(one)) for one, launch in zip(configurations, launch_of, strict=True)
        ]
        self._curve = np.array([numbers.setdefault(key, len(numbers)) for key in each])
        self._noted: set[int] = set()

    def chances(self, measured: Sequence[Observation]) -> np.ndarray:
        """Return the probability that each candidate differs from what is measured, (n,)."""
        chances, agreeing = np.ones(len(self._limits_W)), 0
        last = np.zeros(len(chances), dtype=bool)
        windows: dict[int, list[Observation]] = {}
        for one in measured:
            if math.isfinite(self._limits_W[one.candidate]) and not one.power_capped:
                windows.setdefault(int(self._curve[one.candidate]), []).append(one)
        for curve, several in windows.items():
            free = max(several, key=lambda one: self._limits_W[one.candidate])
            configuration = self._configurations[free.candidate]
            # Power of the whole job, perhaps with its hosts: what a device draws is this at most.
            error = ERRORS * (POWER_NOISE if math.isnan(free.power_rse) else free.power_rse)
            least_W = SLACK * (1 + error) * free.power_W / configuration.world_size
            slack = (self._curve == curve) & (self._limits_W > least_W)
            slack &= self._limits_W < self._limits_W[free.candidate]
            for one in several:
                differ = _differ(one, free) if slack[one.candidate] else None
                if differ:
                    other = self._configurations[one.candidate]
                    why = "so limits far above the mean power bind, and none is left for last"
                    self._note(-1, f"{configuration.short} and {other.short} differ, {why}")
                    return chances
                agreeing += differ is False
            if slack.any():
                what = f"its lower limits above {least_W:.0f} W seem not to bind"
                self._note(curve, f"{configuration.short}: {what} and are probed last")
            last |= slack
        chances[last] = DOUBT ** (1 + agreeing)
        return chances

    def _note(self, curve: int, sentence: str) -> None:
        if curve not in self._noted:
            self._noted.add(curve)
            self.notes.append(sentence)


def _differ(one: Observation, other: Observation) -> bool | None:
    """Return True if two windows differ beyond their errors; None if these hide too much."""
    time, power = one.step_time_s / other.step_time_s, one.power_W / other.power_W
    errors = np.array([(each.step_time_rse, each.power_rse) for each in (one, other)])
    known = np.where(np.isnan(errors), (TIME_NOISE, POWER_NOISE), np.maximum(errors, 1e-4))
    beyond = ERRORS * np.hypot(*known)
    if (abs(np.log([time, power])) > beyond).any():
        return True
    return False if beyond.min() < AGREE else None


def _limit_W(configuration: Configuration) -> float:
    """Return the power limit of each device; NaN if it has none, or one for each stage."""
    limit = configuration.live.get(POWER_LIMIT)
    return float(limit) if isinstance(limit, int | float) else np.nan


def _others(configuration: Configuration) -> Settings:
    live = configuration.live
    return Settings({name: live[name] for name in live if name != POWER_LIMIT})
