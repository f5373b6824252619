"""Watch of the ranks of a running training: which of them the others wait for, and why."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from tuner.online.marks import Mark
from tuner.workload.measure.stragglers import (
    KEPT,
    Arrivals,
    RankState,
    Straggler,
    device_state,
    stragglers,
)
from tuner.workload.meters import Meter, MeterError
from tuner.workload.meters.base import device_states
from tuner.workload.node.device_watch import more_faults
from tuner.workload.node.host_watch import HostWatch
from tuner.workload.platforms.base import Platform

#: Time between two looks at devices and processes, and between two judgements, seconds.
LOOK_S, JUDGE_S = 1.0, 10.0


class RankWatch:
    """Watch of the ranks of one training on this node.

    Args:
        found: called with each straggler when it is first found.

    Attributes:
        stragglers: by rank, as found last.
        last: state of each rank at the last look, by rank.
    """

    def __init__(
        self,
        meter: Meter,
        platform: Platform,
        found: Callable[[Straggler], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stragglers: dict[int, Straggler] = {}
        self.last: dict[int, RankState] = {}
        self._meter, self._platform, self._found, self._clock = meter, platform, found, clock
        self._faults = platform.faults()
        self._arrivals, self._host = Arrivals(), HostWatch(kept=KEPT)
        self._devices: deque[dict[int, dict[str, float]]] = deque(maxlen=KEPT)
        self._looked_s = self._judged_s = clock()
        self._ranks: set[int] = set()

    def take(self, mark: Mark) -> None:
        """Take in a mark of a rank."""
        self._ranks.add(mark.rank)
        if mark.ready:
            self._arrivals.add(mark.rank, mark.step, mark.time_s)

    def look(self, pids: Mapping[int, int]) -> None:
        """Look at devices and processes, and judge, if it is time."""
        now_s = self._clock()
        if len(self._ranks) < 2 or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        self._host.read(pids)
        with contextlib.suppress(MeterError):  # the tuning tells
            self._devices.append(device_states(self._meter.sample()))
        if now_s - self._judged_s >= JUDGE_S:
            self._judged_s = now_s
            self.last = self._states()
            for each in stragglers(self._arrivals, self.last):
                rank = each.state.rank
                new = rank not in self.stragglers
                self.stragglers[rank] = each
                if new:
                    self._found(each)

    def _states(self) -> dict[int, RankState]:
        """Return the state of each rank over the latest looks."""
        faults = more_faults(self._faults, self._platform.faults())
        uuids = list(self._faults)
        found = {}
        for rank in sorted(self._ranks):
            state = device_state(rank, rank, self._devices)
            more = faults.get(uuids[rank], {}) if rank < len(uuids) else {}
            found[rank] = replace(self._host.state(state), faults=more)
        return found
