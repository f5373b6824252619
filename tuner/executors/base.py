"""Protocol of executors, which decide where and when probes run.

The driver cannot tell one executor from another: it submits a request and waits for a record. An
executor never raises for a probe that fails (`tuner.workload.node.agent.run_safely`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tuner.workload.records.probe import Continuation, MeterInfo, ProbeRecord, ProbeRequest


@runtime_checkable
class Executor(Protocol):
    """Protocol of an executor, which runs one or many probes at a time."""

    @property
    def meter(self) -> MeterInfo:
        """The meter of the energy figures."""

    @property
    def capacity(self) -> int:
        """Number of probes that can be in flight together, at least 1; a cluster's may change."""

    @property
    def in_flight(self) -> int:
        """Number of probes in flight."""

    def submit(self, request: ProbeRequest, extend: Continuation | None = None) -> None:
        """Start or queue a probe. The caller keeps `in_flight` below `capacity`.

        Args:
            extend: returns further settings of an extendable probe, called in the thread that
                waits; None ends the probe with its own settings.
        """

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Return the next finished probe; None if none finishes in time or none is in flight."""

    def now_s(self) -> float:
        """Return the seconds on the executor's own clock, real or simulated."""

    def close(self) -> None:
        """Kill the probes in flight and release everything. May be called twice."""
