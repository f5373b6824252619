"""Protocol of executors, which decide where and when probes run, and of the kinds of them.

The driver cannot tell one executor from another: it submits a request and waits for a record. An
executor never raises for a probe that fails (`tuner.executors.local.run_safely`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.records.probe import (
    Announce,
    MeterInfo,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
)


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

    def submit(self, request: ProbeRequest, next_settings: NextSettings | None = None) -> None:
        """Start or queue a probe. The caller keeps `in_flight` below `capacity`.

        Args:
            next_settings: returns further settings of an extendable probe, called in the thread
                that waits; None ends the probe with its own settings.
        """

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        """Return the next finished probe; None if none finishes in time or none is in flight."""

    def now_s(self) -> float:
        """Return the seconds on the executor's own clock, real or simulated."""

    def close(self) -> None:
        """Kill the probes in flight and release everything. May be called twice."""


class Node(Protocol):
    """One node, this one (`tuner.executors.local.ThisNode`), on which something may run."""

    def executor(
        self, job: TrainingJob, cluster: Cluster, *, run_dir: Path, announce: Announce
    ) -> Executor:
        """Return an executor of a job's probes on it."""

    def close(self) -> None:
        """End what runs on it and release its meter."""


@dataclass(frozen=True)
class Opening:
    """What an executor is opened for.

    Attributes:
        run_dir: folder of logs and power samples.
        announce: receives sentences for the user.
        address: of a cluster that runs already, which is joined.
        ranks: number of ranks of the baseline.
        seed: of what is drawn at random.
        node: this machine, if something of the job runs on it already.
    """

    job: TrainingJob
    cluster: Cluster
    run_dir: Path
    announce: Announce
    address: str | None = None
    ranks: int = 1
    seed: int = 0
    node: Node | None = None


class ExecutorUnavailable(InputError):
    """No executor of a kind can be opened on this machine.

    Args:
        why: a clause that begins a sentence.
        remedy: what to do about it, as an imperative.
    """

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}, or run with --executor inline")
        self.why = why


class ExecutorKind:
    """Base of the kinds of executors, whose socket is in `tuner.executors.choose`.

    A class derived from it states the version of the protocol that it follows as `PROTOCOL`.

    Attributes:
        measures: False if its records are predictions.
    """

    measures = True

    def is_default(self, cluster: Cluster, address: str | None) -> bool:
        """Return whether probes on a cluster run by it if the user names no executor."""
        return False

    def phrase(self, cluster: Cluster, address: str | None) -> str:
        """Return how it starts probes."""
        raise NotImplementedError

    def open(self, opening: Opening) -> Executor:
        """Return a prepared executor.

        Raises:
            ExecutorUnavailable: this machine has none; by default, probes run inline.
            InputError: what is asked cannot be done.
        """
        raise NotImplementedError

    def survey(self, address: str, **options: Any) -> Any:
        """Return the nodes of the cluster at an address, whose fitting ones are its `cluster`."""
        raise InputError(f"no cluster can be joined at {address!r} by this executor")
