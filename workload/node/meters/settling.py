"""Energy at a window's edge, drawn from the updates that a source shows while its device is idle.

Independent of the vendor: a source is read by time, and says when it was updated.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tuner.workload.node.meters.base import MeterError, Reading

#: A counter that has not moved for so long is broken: it updates every 20 to 100 ms
#: (ML.ENERGY blog; arXiv 2312.02741), and no GPU draws nothing. Power that was not sampled for so
#: long leaves joules unknown just the same.
SILENT_S = 2.0
#: Least length of a span whose slope is taken: an update period of the slowest counters.
SPAN_S = 0.1
#: Slopes that differ by less are the same: at 70 W idle, an error of 2 W over half a second.
ALIKE = 0.05
#: By now a source that lags has counted the work's last joules: filters and updates of NVML's
#: counters take up to 0.1 s each.
LAG_S = 0.2


#: A counter is watched this often for its next update, and power without a counter is sampled so
#: often meanwhile.
POLL_S, SAMPLE_S = 0.001, 0.01
#: At a window's edge the counter is watched at most this long: a 1 s average takes a second.
SETTLE_MAX_S = 1.5


class EnergySource(Protocol):
    """Source of joules since it was opened."""

    def energy_J(self, now_s: float) -> float:
        """Return the joules now."""


class LostJoules(MeterError):
    """Loss of joules: no later difference of readings would be right."""


class Integral:
    """Joules since construction, by integrating sampled power."""

    def __init__(self, power_W: Callable[[], float], now_s: float) -> None:
        self._power_W = power_W
        self._total_J = 0.0
        self._last = (now_s, power_W())

    def energy_J(self, now_s: float) -> float:
        """Add the energy since the last sample; LostJoules if that is over `SILENT_S` ago."""
        last_s, last_W = self._last
        power_W = self._power_W()
        if now_s - last_s > SILENT_S:
            raise LostJoules(f"the GPU's power was not sampled for {now_s - last_s:.1f} s")
        self._total_J += max(0.0, now_s - last_s) * (last_W + power_W) / 2
        self._last = (max(now_s, last_s), power_W)
        return self._total_J


class Settling:
    """Updates of one source's energy after the ranks have begun to wait.

    Power sensors and energy counters of GPUs see power through a filter and publish it late (A100
    and H100 sample a quarter of each 100 ms: arXiv 2312.02741). Right after work has ended, the
    last joules of the work are not counted yet, and the instant power still shows it. So the source
    is watched until two successive spans have the same slope. That slope is the idle power as this
    very source counts it, and the line through the last update, drawn back to the edge, is the
    energy there. What the source still holds back is the same at both edges of a window and
    cancels.

    A device with power smoothing draws on after the work has ended, and its power falls at a set
    rate (NVML API, Power Smoothing). Where it `smooths`, the line is that of the first span after
    `LAG_S` if its slope is above the last one.
    """

    def __init__(self, *, smooths: bool = False) -> None:
        self._smooths = smooths
        self._updates: list[tuple[float, float]] = []

    def add(self, time_s: float, energy_J: float) -> None:
        """Record that the source was at this energy at this time."""
        self._updates.append((time_s, energy_J))

    def _slope_W(self, last: int) -> tuple[float, int] | None:
        # Of the shortest span that ends at update `last`, and the span's first update.
        last_s, last_J = self._updates[last]
        for first in range(last - 1, -1, -1):
            time_s, energy_J = self._updates[first]
            if last_s - time_s >= SPAN_S - 1e-3:
                return (last_J - energy_J) / (last_s - time_s), first
        return None

    @property
    def settled(self) -> bool:
        """True if the last two spans have the same slope."""
        late = self._slope_W(len(self._updates) - 1) if self._updates else None
        early = self._slope_W(late[1]) if late is not None else None
        if late is None or early is None:
            return False
        return abs(late[0] - early[0]) <= ALIKE * max(abs(late[0]), abs(early[0]))

    def energy_J(self, at_s: float) -> float | None:
        """Return the energy at a time of this wait; None if the source was not updated twice."""
        if len(self._updates) < 2:
            return None
        if self._smooths and (fall := self._fall(at_s)) is not None:
            number, early_W, _ = fall
            time_s, energy_J = self._updates[number]
            return energy_J + early_W * (at_s - time_s)
        return self._drawn_J(at_s)

    def _drawn_J(self, at_s: float) -> float:
        last_s, last_J = self._updates[-1]
        late = self._slope_W(len(self._updates) - 1)
        first_s, first_J = self._updates[0]
        slope_W = late[0] if late is not None else (last_J - first_J) / (last_s - first_s)
        return last_J + slope_W * (at_s - last_s)

    def _fall(self, at_s: float) -> tuple[int, float, float] | None:
        # The first update after the lag, the slope of the span that begins there, and the last
        # slope; None unless the power still fell from the one to the other.
        late = self._slope_W(len(self._updates) - 1)
        numbers = range(len(self._updates))
        first = next((i for i in numbers if self._updates[i][0] >= at_s + LAG_S), None)
        if late is None or first is None:
            return None
        first_s, first_J = self._updates[first]
        for time_s, energy_J in self._updates[first + 1 :]:
            if time_s - first_s >= SPAN_S - 1e-3:
                early_W = (energy_J - first_J) / (time_s - first_s)
                falls = early_W - late[0] > 2 * ALIKE * abs(late[0])
                return (first, early_W, late[0]) if falls else None
        return None

    def doubt_J(self, at_s: float, seen_J: float) -> float:
        """Return the joules by which the energy at a time may be wrong.

        They are what a fall of the power would have added since then. Where the device smooths its
        power, a fast fall looks like the source's own lag, so all that came late is in doubt.

        Args:
            seen_J: the source's energy at that time, which lags.
        """
        if len(self._updates) < 2:
            return 0.0
        if self._smooths:
            return max(0.0, self._drawn_J(at_s) - seen_J)
        if (fall := self._fall(at_s)) is None:
            return 0.0
        return (fall[1] - fall[2]) * (self._updates[-1][0] - at_s)


class Edge:
    """The energy of one source at a window's edge, watched while its GPU is idle."""

    def __init__(
        self, source: EnergySource, now_s: float, *, counts: bool, smooths: bool = False
    ) -> None:
        self._source, self._settling = source, Settling(smooths=smooths)
        self._counts = counts
        self._first_J = self._last_J = source.energy_J(now_s)
        self._polled_s = now_s
        if not self._counts:
            self._settling.add(now_s, self._last_J)

    def poll(self, clock: Callable[[], float]) -> bool:
        """Look for an update; return True if the source counts the idle power alone."""
        now_s = clock()
        if self._counts:
            value_J = self._source.energy_J(now_s)
            if value_J != self._last_J:  # it was updated between the two looks
                self._settling.add((self._polled_s + now_s) / 2, value_J)
            self._last_J, self._polled_s = value_J, now_s
        elif now_s - self._polled_s >= SAMPLE_S:
            self._last_J, self._polled_s = self._source.energy_J(now_s), now_s
            self._settling.add(now_s, self._last_J)
        return self._settling.settled

    def energy_J(self, at_s: float) -> float:
        """Return the energy at a time; the value when watching began if it never changed."""
        value_J = self._settling.energy_J(at_s)
        return self._first_J if value_J is None else value_J

    def doubt_J(self, called_s: float) -> float:
        """Return the joules that power which still falls may have added since a time."""
        return self._settling.doubt_J(called_s, self._first_J)


class WatchedMeter:
    """Base of the meters whose sources are watched at a window's edge; a subclass has `read`.

    Lost joules break the meter for good.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock, self._broken = threading.Lock(), ""

    def read(self) -> Reading:
        """Return the joules since the meter was opened."""
        raise NotImplementedError

    def _integrate(self) -> None:
        # The next reader meets the error.
        with contextlib.suppress(MeterError):
            self.read()

    def _check(self) -> None:
        if self._broken:
            raise MeterError(self._broken)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._check()
            try:
                yield
            except LostJoules as error:
                self._broken = str(error)
                raise

    def _at_edge(self, edges: Sequence[Edge], called_s: float, *, opens: bool) -> Reading:
        # Watch the sources, while their devices are idle, until each counts the idle power alone.
        waiting, tries = list(edges), round(SETTLE_MAX_S / POLL_S)
        while waiting and tries > 0 and self._clock() - called_s < SETTLE_MAX_S:
            self._sleep(POLL_S)
            tries -= 1
            waiting = [edge for edge in waiting if not edge.poll(self._clock)]
        edge_s = self._clock() if opens else called_s
        energy_J = math.fsum(edge.energy_J(edge_s) for edge in edges)
        return Reading(edge_s, energy_J, math.fsum(edge.doubt_J(called_s) for edge in edges))
