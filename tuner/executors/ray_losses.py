"""Agents of a Ray cluster that died while they had a probe, and whose fault that is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tuner.executors.ray_flights import Flight
from tuner.search_spaces.configuration import Settings
from tuner.workload.records.probe import Failure, shown_by

#: Agents that die with one launch before it is blamed. Anybody may end an agent once; one that dies
#: with the same launch again, in a new process, is the work of the launch. Not fitted.
_LOSSES = 2


class Losses:
    """Causes of dead agents, by Ray's records and by the agents that a launch lost before."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._of_launch: Counter[Settings] = Counter()

    def failure(self, flight: Flight, error: Exception) -> Failure:
        """Return the failure of a probe whose agent died, though its node is alive."""
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            return Failure(
                shown_by("no memory"),
                "out of host memory: Ray's memory monitor ended the node agent before the kernel "
                "ended a rank; start Ray with RAY_memory_monitor_refresh_ms=0",
            )
        reason = str(error).strip().splitlines()[0]
        if flight.cancelled:
            return Failure("time_limit", f"the node agent died: {reason}")
        if self._is_first(flight):
            return Failure("node", f"the node agent died: {reason}")
        return Failure("crash", f"the node agent died with this launch again: {reason}")

    def failure_of_peer(self, flight: Flight, failure: Failure) -> Failure:
        """Return the failure of a probe on several nodes, reported by another than the first."""
        return failure if self._is_first(flight) else replace(failure, kind="crash")

    def _is_first(self, flight: Flight) -> bool:
        self._of_launch[flight.request.launch] += 1
        return self._of_launch[flight.request.launch] < _LOSSES
