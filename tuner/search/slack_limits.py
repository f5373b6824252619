"""Power limits that cannot bind: further ones of the same launch are one candidate.

A power limit well above what the devices draw changes nothing, and neither does any other limit
above that. Once a window at such a limit is measured, the settings of its launch that differ in
such a limit only are as good as measured: they have its step time and power within its error, and
are not probed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tuner.models.surrogate.surrogates import POWER_NOISE
from tuner.search.observations import Observation
from tuner.search_spaces.configuration import Configuration, Settings

__all__ = ["SLACK", "SlackLimits"]

#: A limit cannot bind if it exceeds the mean power of a device by this factor. The mean hides
#: phases of higher power: on zeus-nsdi23, limits of 1.05 to 1.3 times the mean still lower it, and
#: beyond 1.3 power no longer rises with the limit.
SLACK = 1.3
#: Standard errors of the measured power that are added to it: a limit that is wrongly taken for one
#: that cannot bind is never probed.
ERRORS = 3.0
POWER_LIMIT = "power_limit_W"


class SlackLimits:
    """Candidates that equal a measured one, because neither's power limit binds.

    Args:
        configurations: the candidates.
        members: the candidates of each launch, by number.
        launch_of: number of each candidate's launch.

    Attributes:
        equal_to: candidate -> the measured candidate that it equals, both by number.
        notes: a sentence for the user for each measured candidate that others equal.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        members: Sequence[np.ndarray],
        launch_of: np.ndarray,
    ) -> None:
        self._configurations, self._members, self._launch_of = configurations, members, launch_of
        self._limits_W = np.array([_limit_W(one) for one in configurations])
        self.equal_to: dict[int, int] = {}
        self.notes: list[str] = []
        self._noted: set[int] = set()
        self._read: list[Observation] = []

    def closed(self, measured: Sequence[Observation]) -> list[int]:
        """Return the candidates that equal one of these measurements, and note them.

        Args:
            measured: continues the measurements of the last call, or replaces them.
        """
        if not np.isfinite(self._limits_W).any():
            return []
        if list(measured[: len(self._read)]) != self._read:
            self.equal_to, self._read = {}, []
        seen = {observation.candidate for observation in measured}
        for observation in measured[len(self._read) :]:
            self._read_one(observation, seen)
        self._read = list(measured)
        return list(self.equal_to)

    def _read_one(self, observation: Observation, seen: set[int]) -> None:
        here = observation.candidate
        configuration = self._configurations[here]
        # Power of the whole job, perhaps with its hosts: what a device draws is this at most.
        stated = observation.power_rse
        error = ERRORS * (POWER_NOISE if math.isnan(stated) else stated)
        least_W = SLACK * (1 + error) * observation.power_W / configuration.world_size
        if observation.power_capped or not self._limits_W[here] > least_W:
            return
        rows = self._members[self._launch_of[here]]
        equal = [
            int(row)
            for row in rows[self._limits_W[rows] > least_W]
            if row not in seen
            and row not in self.equal_to
            and _others(self._configurations[row]) == _others(configuration)
        ]
        self.equal_to |= dict.fromkeys(equal, here)
        if equal and here not in self._noted:
            self._noted.add(here)
            self.notes.append(
                f"{configuration.short}: limits above {least_W:.0f} W cannot bind; {len(equal)} "
                "further power limits of this launch equal this one and are not probed"
            )


def _limit_W(configuration: Configuration) -> float:
    """Return the power limit of each device; NaN if it has none, or one for each stage."""
    limit = configuration.live.get(POWER_LIMIT)
    return float(limit) if isinstance(limit, int | float) else np.nan


def _others(configuration: Configuration) -> Settings:
    live = configuration.live
    return Settings({name: live[name] for name in live if name != POWER_LIMIT})
