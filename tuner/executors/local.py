"""Executors in this process: one probe at a time, or many on simulated time."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from pathlib import Path

from tuner.search_spaces.errors import InputError
from tuner.workload.agent import run_safely
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.runners import Continuation, Runner, extended


class InlineExecutor:
    """Executor of one probe at a time: `wait` runs the oldest request."""

    def __init__(self, runner: Runner, *, keep_in: str | Path | None = None) -> None:
        self._runner, self._keep_in = runner, keep_in
        self._queue: deque[ProbeRequest] = deque()
        self.meter = runner.meter
        self.capacity = 1
        self.next_settings: Continuation | None = None

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def submit(self, request: ProbeRequest) -> None:
        self._queue.append(request)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Run the oldest request to its end, which its own time limit bounds, not `timeout_s`."""
        if not self._queue:
            return None
        try:
            return run_safely(
                self._runner, self._queue[0], self._keep_in, next_settings=self.next_settings
            )
        finally:
            self._queue.popleft()

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._queue.clear()
        self._runner.close()


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
        self._heap: list[tuple[float, int, float, ProbeRecord]] = []  # end, number, start, record
        self._submitted = 0
        self._now_s = 0.0
        self.meter = runner.meter
        self.capacity = capacity
        self.next_settings: Continuation | None = None

    @property
    def in_flight(self) -> int:
        return len(self._heap)

    def submit(self, request: ProbeRequest) -> None:
        self._submitted += 1
        self._run(request, self._submitted, self._now_s)

    def _run(self, request: ProbeRequest, number: int, began_s: float) -> None:
        record = run_safely(self._runner, request)
        heapq.heappush(self._heap, (began_s + record.wall_s, number, began_s, record))

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Advance the clock to the next end, or by `timeout_s` if nothing ends sooner."""
        until_s = math.inf if timeout_s is None else self._now_s + timeout_s
        while self._heap:
            end_s, number, began_s, record = self._heap[0]
            if end_s > until_s:
                self._now_s = until_s
                return None
            self._now_s = end_s
            # It stays in flight while its next settings are chosen.
            longer = None
            if record.request.extendable and self.next_settings is not None:
                longer = extended(record, self.next_settings)
            heapq.heappop(self._heap)
            if longer is None:
                return record
            self._run(longer, number, began_s)
        return None

    def now_s(self) -> float:
        return self._now_s

    def close(self) -> None:
        self._heap.clear()
        self._runner.close()
