"""Clocks that are listed and never reached: those above the first one are probed last.

Consumer cards list clocks above those that their voltage limiter allows, and give no reason for
running lower. A window at such a clock is no data point, and the energy of its launch is lost. The
limiter belongs to the device, so what falls short in one launch falls short in all of them: a clock
that fell short puts itself and all higher ones last, until a window of any launch runs at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tuner.search.observations import Observations
from tuner.search.slack_limits import DOUBT
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.measure.measurement import CLOCK_SHARE

CLOCK = "clock_MHz"


class UnreachedClocks:
    """Candidates at clocks that the devices do not reach.

    Attributes:
        notes: a sentence for the user for each clock that puts others last.
    """

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self._configurations = configurations
        self._clocks_MHz = np.array(
            [max(_clocks_MHz(one.live), default=0) for one in configurations]
        )
        self.notes: list[str] = []
        self._noted_MHz = np.inf

    def chances(self, observations: Observations) -> np.ndarray:
        """Return the probability that each candidate runs as set, as far as its clock tells, (n,).

        It is below 1 at a clock that fell short and above it, and falls with each such window. A
        clock does not count if another window ran at it or above it: the devices may have been
        disturbed.
        """
        ran = [max(_clocks_MHz(one.delivered.live), default=0) for one in observations.measured]
        highest_MHz = max(ran, default=0.0)
        misses = [
            miss
            for candidate, delivered in observations.not_taken.items()
            if (miss := _miss(self._configurations[candidate].live, delivered)) is not None
            and (1 - CLOCK_SHARE) * miss[0] > highest_MHz
        ]
        if not misses:
            return np.ones(len(self._clocks_MHz))
        least_MHz, ran_MHz = min(misses)
        if least_MHz < self._noted_MHz:
            self._noted_MHz = least_MHz
            self.notes.append(
                f"the devices ran at {ran_MHz:.0f} MHz when set to {least_MHz:.0f} MHz: settings "
                f"with a clock of {least_MHz:.0f} MHz or more are probed last"
            )
        return np.where(self._clocks_MHz >= least_MHz, DOUBT ** (1 + len(misses)), 1.0)


def _clocks_MHz(live: Settings) -> list[float]:
    """Return the clock of each stage; empty if it is left to the device."""
    clock = live.get(CLOCK)
    parts = clock if isinstance(clock, tuple) else (clock,)
    return [float(part) for part in parts if isinstance(part, int | float)]


def _miss(live: Settings, delivered: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the lowest clock that fell short, and what ran instead; None if none did."""
    clocks = live.get(CLOCK)
    stages = (
        [(f"{CLOCK}.{i}", one) for i, one in enumerate(clocks)]
        if isinstance(clocks, tuple)
        else [(CLOCK, clocks)]
    )
    short = [
        (float(clock), delivered[key])
        for key, clock in stages
        if isinstance(clock, int | float)
        and key in delivered
        and delivered[key] < (1 - CLOCK_SHARE) * clock
    ]
    return min(short, default=None)
