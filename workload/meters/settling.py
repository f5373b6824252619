"""Energy at a window's edge, from what a source reports afterwards, while its GPU is idle.

Power sensors and energy counters of GPUs see power through a filter and publish it late (A100 and
H100 sample a quarter of each 100 ms: arXiv 2312.02741). Right after work has ended, the last joules
of the work are not counted yet, and the instant power still shows it. So the source is watched
until two successive spans have the same slope. That slope is the idle power as this very source
counts it, and the line through the last update, drawn back to the edge, is the energy there. What
the source still holds back is the same at both edges of a window and cancels.
"""

from __future__ import annotations

#: Least length of a span whose slope is taken: an update period of the slowest counters.
SPAN_S = 0.1
#: Slopes that differ by less are the same: at 70 W idle, an error of 2 W over half a second.
ALIKE = 0.05


class Settling:
    """Updates of one source's energy after the ranks have begun to wait."""

    def __init__(self) -> None:
        self._updates: list[tuple[float, float]] = []

    def add(self, time_s: float, energy_J: float) -> None:
        """Record that the source was at this energy at this time."""
        self._updates.append((time_s, energy_J))

    def _slope_W(self, last: int) -> tuple[float, int] | None:
        """Return the slope of the shortest span that ends at update `last`, and its first one."""
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
        last_s, last_J = self._updates[-1]
        late = self._slope_W(len(self._updates) - 1)
        first_s, first_J = self._updates[0]
        slope_W = late[0] if late is not None else (last_J - first_J) / (last_s - first_s)
        return last_J + slope_W * (at_s - last_s)
