"""Protocol of the runners, which take requests and return records of probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from tuner.search_spaces.configuration import Settings
from tuner.workload.records.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest

#: Called when all settings of an extendable request are visited, with the request so far and its
#: measurements; returns further settings to visit in the same launch, none to end it.
Continuation = Callable[[ProbeRequest, Sequence[Measurement]], Sequence[Settings]]


def extended(record: ProbeRecord, next_settings: Continuation) -> ProbeRequest | None:
    """Return the record's request with its next settings added, or None if there are none."""
    more = next_settings(record.request, record.measurements) if record.ok else ()
    request = record.request
    return replace(request, live=(*request.live, *more)) if more else None


@runtime_checkable
class Runner(Protocol):
    """Measurer of probes: real, replayed or simulated."""

    meter: MeterInfo

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Run one probe; a failure is in its record. InputError if it names an unknown knob."""
        ...

    def run_interactive(self, request: ProbeRequest, next_settings: Continuation) -> ProbeRecord:
        """Run one probe, which visits the settings that `next_settings` returns besides.

        A runner whose launches cost nothing runs the longer probe anew.
        """
        record = self.run(request)
        while (longer := extended(record, next_settings)) is not None:
            record = self.run(longer)
        return record

    def close(self) -> None:
        return None
