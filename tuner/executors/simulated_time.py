"""Executor of probes whose records are known at once, on simulated time."""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.executors.local import run_safely
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import (
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    Runner,
    extended,
)

if TYPE_CHECKING:
    import numpy as np


@dataclass(order=True)
class _Flight:
    """A probe in flight: when its record ends, its number, when it began, and its record."""

    end_s: float
    number: int
    began_s: float = field(compare=False)
    record: ProbeRecord = field(compare=False)
    next_settings: NextSettings | None = field(compare=False)


def draws(seed: int, *names: str) -> np.random.Generator:
    """Return the generator of the draws that have these names."""
    import numpy as np  # a command whose options name the units of a table does not need it

    text = "\n".join((str(seed), *names)).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))


class SimulatedExecutor:
    """Executor of many probes on simulated time, in one thread.

    A probe's record is made when it is submitted and returned when the clock reaches its end,
    `wall_s` later. Probes that end at the same instant are returned in the order of submission. An
    extendable probe gets its next settings when the clock reaches the end of its list, and
    continues there.
    """

    def __init__(self, runner: Runner, *, capacity: int = 1) -> None:
        if capacity < 1:
            raise InputError(f"in flight is {capacity}; it must be an integer of at least 1")
        self._runner = runner
        self._heap: list[_Flight] = []
        self._submitted = 0
        self._now_s = 0.0
        self.meter = runner.meter
        self.capacity = capacity

    @property
    def in_flight(self) -> int:
        return len(self._heap)

    def submit(self, request: ProbeRequest, next_settings: NextSettings | None = None) -> None:
        self._submitted += 1
        self._run(request, self._submitted, self._now_s, next_settings)

    def _run(
        self, request: ProbeRequest, number: int, began_s: float, next_settings: NextSettings | None
    ) -> None:
        record = run_safely(self._runner, request)
        flight = _Flight(began_s + record.wall_s, number, began_s, record, next_settings)
        heapq.heappush(self._heap, flight)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Advance the clock to the next end, or by `timeout_s` if nothing ends sooner."""
        until_s = math.inf if timeout_s is None else self._now_s + timeout_s
        while self._heap:
            flight = self._heap[0]
            if flight.end_s > until_s:
                self._now_s = until_s
                return None
            self._now_s = flight.end_s
            # It stays in flight while its next settings are chosen.
            longer = None
            if flight.record.request.extendable and flight.next_settings is not None:
                longer = extended(flight.record, flight.next_settings)
            heapq.heappop(self._heap)
            if longer is None:
                return flight.record
            self._run(longer, flight.number, flight.began_s, flight.next_settings)
        return None

    def now_s(self) -> float:
        return self._now_s

    def close(self) -> None:
        self._heap.clear()
        self._runner.close()
