"""Where and when probes run, behind one small protocol: submit a request, wait for a record.

The driver cannot tell one executor from another. `InlineExecutor` runs one probe at a time in this
process, for a node without Ray; `SimulatedExecutor` keeps many in flight on simulated time, for
replay and simulation; the third, on Ray, is `tuner.ray_executor`. An executor never raises for a
probe that fails: whatever goes wrong with one probe comes back as that probe's record.
"""

from __future__ import annotations

import heapq
import math
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from search_spaces.configuration import Settings
from search_spaces.errors import InputError
from workload.probe import (
    Failure,
    GoOn,
    Measurement,
    MeterInfo,
    OpenRunner,
    ProbeRecord,
    ProbeRequest,
    Runner,
)
from workload.trace import put_by, unfinished

__all__ = ["Executor", "InlineExecutor", "SimulatedExecutor", "run_safely"]


@runtime_checkable
class Executor(Protocol):
    """Runs probes, one or many at a time.

    Attributes:
        meter: where the energy figures will come from. Known before the first probe.
        capacity: how many probes may be in flight together; at least 1. May change as a cluster
            grows or shrinks.
        in_flight: how many are.
        go_on: asked what an open probe visits besides, in the thread that waits; None ends each
            with its own list.
    """

    go_on: GoOn | None

    @property
    def meter(self) -> MeterInfo: ...

    @property
    def capacity(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    def submit(self, request: ProbeRequest) -> None:
        """Start (or queue) a probe. The caller keeps `in_flight` below `capacity`."""

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """The next finished probe; None when none finished in time or none is in flight."""

    def now_s(self) -> float:
        """Seconds on the executor's own clock: the wall's, or the simulation's."""

    def close(self) -> None:
        """Kill what is in flight and release everything. May be called twice."""


def run_safely(
    runner: Runner,
    request: ProbeRequest,
    keep_in: str | Path | None = None,
    *,
    go_on: GoOn | None = None,
) -> ProbeRecord:
    """Run one probe; an exception becomes a failed record, so that it cannot stop a study.

    Args:
        runner: answers.
        request: what is asked.
        keep_in: the run's folder: the record is kept there until it is in the trace, so that a
            driver that dies before it has written it down loses nothing (`keep_record`). Of an open
            request, what was measured is kept each time that it is asked what else to visit.
        go_on: says what an open request visits besides.
    """
    so_far = ProbeRecord(request, (), runner.meter)

    def asked(longer: ProbeRequest, measurements: Sequence[Measurement]) -> Sequence[Settings]:
        nonlocal so_far
        so_far = unfinished(longer, measurements, runner.meter)
        put_by(keep_in, so_far)
        return go_on(longer, measurements) if go_on is not None else ()

    try:
        if go_on is None or not request.open:
            record = runner.run(request)
        elif isinstance(runner, OpenRunner):
            record = runner.run_open(request, asked)
        else:
            record = runner.run(request)
            while (longer := _longer(record, asked)) is not None:
                record = runner.run(longer)
    except InputError as error:
        record = replace(so_far, failure=Failure("refused", str(error)))
    except Exception as error:
        kind = type(error).__name__
        failure = Failure("crash", f"the runner raised {kind}: {error}", traceback.format_exc())
        record = replace(so_far, failure=failure)
    put_by(keep_in, record)
    return record


def _longer(record: ProbeRecord, go_on: GoOn) -> ProbeRequest | None:
    """The request with what else is to be visited; None where that is nothing."""
    more = go_on(record.request, record.measurements) if record.ok else ()
    request = record.request
    return replace(request, live=(*request.live, *more)) if more else None


class InlineExecutor:
    """One probe at a time, in this process: `wait` runs the oldest request.

    Args:
        runner: answers.
        keep_in: the run's folder, where a record is kept until it is in the trace.
    """

    def __init__(self, runner: Runner, *, keep_in: str | Path | None = None) -> None:
        self._runner, self._keep_in = runner, keep_in
        self._queue: deque[ProbeRequest] = deque()
        self.meter = runner.meter
        self.capacity = 1
        self.go_on: GoOn | None = None

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def submit(self, request: ProbeRequest) -> None:
        self._queue.append(request)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Run the oldest request to its end; `timeout_s` is its own time limit's business."""
        if not self._queue:
            return None
        try:
            return run_safely(self._runner, self._queue[0], self._keep_in, go_on=self.go_on)
        finally:
            self._queue.popleft()

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._queue.clear()
        self._runner.close()


class SimulatedExecutor:
    """Many probes in flight on simulated time, in one thread.

    A probe's record is made when it is submitted and handed out when the clock reaches its end,
    `wall_s` later. Ends at one instant come out in the order of submission. An open probe is asked
    about when the clock reaches the end of its list, and goes on from there.

    Args:
        runner: answers at once (replay, simulation).
        capacity: how many may be in flight.
    """

    def __init__(self, runner: Runner, *, capacity: int = 1) -> None:
        if capacity < 1:
            raise InputError(f"in flight is {capacity}; it must be an integer of at least 1")
        self._runner = runner
        self._heap: list[tuple[float, int, float, ProbeRecord]] = []  # end, which, start, record
        self._submitted = 0
        self._now_s = 0.0
        self.meter = runner.meter
        self.capacity = capacity
        self.go_on: GoOn | None = None

    @property
    def in_flight(self) -> int:
        return len(self._heap)

    def submit(self, request: ProbeRequest) -> None:
        self._submitted += 1
        self._run(request, self._submitted, self._now_s)

    def _run(self, request: ProbeRequest, which: int, began_s: float) -> None:
        record = run_safely(self._runner, request)
        heapq.heappush(self._heap, (began_s + record.wall_s, which, began_s, record))

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Advance the clock to the next end, or by `timeout_s` where nothing ends sooner."""
        until_s = math.inf if timeout_s is None else self._now_s + timeout_s
        while self._heap:
            end_s, which, began_s, record = self._heap[0]
            if end_s > until_s:
                self._now_s = until_s
                return None
            self._now_s = end_s
            # It stays in flight while it is asked about.
            longer = None
            if record.request.open and self.go_on is not None:
                longer = _longer(record, self.go_on)
            heapq.heappop(self._heap)
            if longer is None:
                return record
            self._run(longer, which, began_s)
        return None

    def now_s(self) -> float:
        return self._now_s

    def close(self) -> None:
        self._heap.clear()
        self._runner.close()
