"""Protocols of the runners, which take requests and return records of probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tuner.search_spaces.configuration import Settings
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest


@runtime_checkable
class Runner(Protocol):
    """Measurer of probes: real, replayed or simulated."""

    meter: MeterInfo

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Run one probe; a failure is in its record. InputError if it names an unknown knob."""

    def close(self) -> None:
        """End what the runner holds."""


#: Called when all settings of an extendable request are visited, with the request so far and its
#: measurements; returns further settings to visit in the same launch, none to end it.
Continuation = Callable[[ProbeRequest, Sequence[Measurement]], Sequence[Settings]]


@runtime_checkable
class InteractiveRunner(Runner, Protocol):
    """A runner whose launches stay up while it asks for the next settings."""

    def run_interactive(self, request: ProbeRequest, next_settings: Continuation) -> ProbeRecord:
        """Run one probe, which visits the settings that `next_settings` returns besides."""
