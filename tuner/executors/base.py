"""Protocol of executors, which decide where and when probes run, and their handling of failures.

The driver cannot tell one executor from another: it submits a request and waits for a record. An
executor never raises for a probe that fails: any error of one probe is returned as its record.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.pending import partial_record, save_partial
from tuner.workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.runners import Continuation, InteractiveRunner, Runner


@runtime_checkable
class Executor(Protocol):
    """Protocol of an executor, which runs one or many probes at a time.

    Attributes:
        capacity: number of probes that may be in flight together, at least 1. May change as a
            cluster grows or shrinks.
        next_settings: extends extendable probes, in the thread that waits; None ends each
            with its own list.
    """

    next_settings: Continuation | None

    @property
    def meter(self) -> MeterInfo:
        """The meter of the energy figures."""

    @property
    def capacity(self) -> int:
        """Number of probes that can be in flight together."""

    @property
    def in_flight(self) -> int:
        """Number of probes in flight."""

    def submit(self, request: ProbeRequest) -> None:
        """Start or queue a probe. The caller keeps `in_flight` below `capacity`."""

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Return the next finished probe; None if none finishes in time or none is in flight."""

    def now_s(self) -> float:
        """Return the seconds on the executor's own clock, real or simulated."""

    def close(self) -> None:
        """Kill the probes in flight and release everything. May be called twice."""


def run_safely(
    runner: Runner,
    request: ProbeRequest,
    keep_in: str | Path | None = None,
    *,
    next_settings: Continuation | None = None,
) -> ProbeRecord:
    """Run one probe; return an exception as a failed record, so that it cannot stop a study.

    Args:
        keep_in: the run's folder, where the record is kept until it is in the trace, so that
            nothing is lost if the driver dies before. The measurements of an extendable request
            are kept each time it asks for settings.
    """
    partial = ProbeRecord(request, (), runner.meter)

    def keep_and_continue(
        longer: ProbeRequest, measurements: Sequence[Measurement]
    ) -> Sequence[Settings]:
        nonlocal partial
        partial = partial_record(longer, measurements, runner.meter)
        save_partial(keep_in, partial)
        return next_settings(longer, measurements) if next_settings is not None else ()

    try:
        if next_settings is None or not request.extendable:
            record = runner.run(request)
        elif isinstance(runner, InteractiveRunner):
            record = runner.run_interactive(request, keep_and_continue)
        else:
            record = runner.run(request)
            while (longer := extended(record, keep_and_continue)) is not None:
                record = runner.run(longer)
    except InputError as error:
        record = replace(partial, failure=Failure("refused", str(error)))
    except Exception as error:
        kind = type(error).__name__
        failure = Failure("crash", f"the runner raised {kind}: {error}", traceback.format_exc())
        record = replace(partial, failure=failure)
    save_partial(keep_in, record)
    return record


def extended(record: ProbeRecord, next_settings: Continuation) -> ProbeRequest | None:
    """Return the record's request with its next settings added, or None if there are none."""
    more = next_settings(record.request, record.measurements) if record.ok else ()
    request = record.request
    return replace(request, live=(*request.live, *more)) if more else None
