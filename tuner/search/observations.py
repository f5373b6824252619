"""Observations of the candidates, read from probe records: measured, failed, in flight.

A measured candidate is closed, and so is one that failed by its own fault. A failure that blames
the launch closes all its live settings; one that blames neither leaves the candidate open. Settings
that a running probe visited without a result are closed until its record says more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import Failure, Measurement, ProbeRecord

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates

#: Begins the flag of a window in which the power limit of a device was active.
POWER_CAPPED = "throttle_power"


@dataclass(frozen=True)
class Observation:
    """One finished measurement: the candidate, the configuration that really ran, and figures.

    `power_capped` is True if the devices reported that their power limit slowed them down.
    """

    candidate: int
    delivered: Configuration
    step_time_s: float
    power_W: float
    step_time_rse: float
    power_rse: float
    power_capped: bool = False

    @classmethod
    def of(
        cls, candidate: int, configuration: Configuration, measurement: Measurement
    ) -> Observation:
        """Return the observation of a window; models learn from the settings that were delivered,
        which may differ from the requested."""
        live = measurement.as_delivered
        if live != measurement.live:
            configuration = Configuration(configuration.launch, live)
        return cls(
            candidate,
            configuration,
            measurement.step_time_s,
            measurement.power_W,
            measurement.step_time_rse,
            measurement.power_rse,
            any(flag.startswith(POWER_CAPPED) for flag in measurement.flags),
        )


class Observations:
    """Measurements and failures of the candidates, and the candidates in flight.

    Attributes:
        peak_bytes: peak memory by launch; infinite if it ran out of memory, NaN if not measured.
        not_taken: of candidates that the devices did not run as set, the clocks at which they ran,
            by name ("clock_MHz", of a stage "clock_MHz.0").
    """

    def __init__(
        self, candidates: Candidates, launch_of: np.ndarray, pending: Sequence[int] = ()
    ) -> None:
        self._candidates, self._launch_of, self.pending = candidates, launch_of, list(pending)
        self.measured: list[Observation] = []
        self.closed: set[int] = set()
        self.failed_launches: set[int] = set()
        self.peak_bytes: dict[int, float] = {}
        self.not_taken: dict[int, dict[str, float]] = {}

    @classmethod
    def of(
        cls,
        records: Iterable[ProbeRecord],
        in_flight: Iterable[Configuration],
        candidates: Candidates,
        launch_of: np.ndarray,
    ) -> Observations:
        """Return the observations of these records, oldest first, and the candidates in flight.

        Args:
            launch_of: number of each candidate's launch.
        """
        pending = (candidates.find(configuration) for configuration in in_flight)
        found = cls(candidates, launch_of, [i for i in pending if i is not None])
        for record in records:
            found._add(record)
        return found

    def _add(self, record: ProbeRecord) -> None:
        measurements = {m.live: m for m in record.measurements}
        missed = {m.live: m for m in record.missed}
        unmeasured: list[int] = []
        launch: int | None = None
        for configuration in record.request.configurations():
            candidate, live = self._candidates.find(configuration), configuration.live
            if candidate is None:
                continue
            launch = int(self._launch_of[candidate])
            if live in measurements:
                self._add_measurement(candidate, measurements[live])
            elif live in missed:
                self.closed.add(candidate)
                self.not_taken[candidate] = dict(missed[live].delivered)
            else:
                unmeasured.append(candidate)
        if record.failure is None:
            self.closed.update(unmeasured)
        elif launch is not None:
            self._add_failure(record.failure, launch, unmeasured)

    def _add_measurement(self, candidate: int, measurement: Measurement) -> None:
        self.closed.add(candidate)
        launch, peak = int(self._launch_of[candidate]), measurement.peak_memory_bytes
        before = self.peak_bytes.get(launch, math.nan)
        self.peak_bytes[launch] = float(np.fmax(math.nan if peak is None else peak, before))
        configuration = self._candidates[candidate]
        self.measured.append(Observation.of(candidate, configuration, measurement))

    def _add_failure(self, failure: Failure, launch: int, unmeasured: list[int]) -> None:
        kind = failure.type
        if kind.blames is not None:  # otherwise they may be proposed again
            self.closed.update(unmeasured)
        if kind.blames == "launch" or (kind.blames == "program" and self.measured):
            self.failed_launches.add(launch)
        elif kind.blames in ("ranks", "program"):
            least = 2 if kind.blames == "ranks" else 1
            every = zip(self._candidates.configurations, self._launch_of, strict=True)
            self.failed_launches |= {int(number) for c, number in every if c.world_size >= least}
        if kind.lacks_memory:
            self.peak_bytes[launch] = math.inf
