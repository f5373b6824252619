"""Observations of the candidates in a study: measured, failed, in flight.

Each finished trial is read once. A measured candidate is closed, and so is one that failed by its
own fault; a failure that blames the launch closes all its live settings; one that blames neither
leaves the candidate open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.trial import TrialState

from tuner.search.parameters import ParameterEncoding
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.probe import Measurement, ProbeRecord, failure_class

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: Begins the names of a trial's attributes that hold what the devices did.
DELIVERED = "delivered_"
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


class Observations:
    """Measurements, failures and pending trials of the candidates.

    Attributes:
        peak_bytes: launch -> peak memory; infinite if it ran out of memory, NaN if not measured.
        not_taken: candidate that the devices did not run as set -> the clocks at which they ran, by
            name ("clock_MHz", of a stage "clock_MHz.0").
    """

    def __init__(self, encoding: ParameterEncoding, launch_of: np.ndarray) -> None:
        self._encoding, self._launch_of = encoding, launch_of
        self._parsed: set[int] = set()
        self.measured: list[Observation] = []
        self.closed: set[int] = set()
        self.failed_launches: set[int] = set()
        self.pending: list[int] = []
        self.peak_bytes: dict[int, float] = {}
        self.not_taken: dict[int, dict[str, float]] = {}

    def update(self, study: Study) -> None:
        """Read the trials that finished since the last call, and those in flight now."""
        self.pending = []
        for trial in study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING)
        ):
            if trial.number in self._parsed:
                continue
            candidate = self._encoding.index_of_trial(trial)
            if trial.state == TrialState.RUNNING:
                if candidate is not None:
                    self.pending.append(candidate)
                continue
            self._parsed.add(trial.number)
            if candidate is None:
                continue
            if trial.state == TrialState.FAIL:
                self._add_failure(candidate, trial.user_attrs)
            else:
                self._add_measurement(candidate, trial)

    def with_partial(self, so_far: ProbeRecord) -> Observations:
        """Return a copy in which a running probe has ended with its measurements so far."""
        measurements = {m.live: m for m in so_far.measurements}
        visits: dict[int, Measurement | None] = {}
        for configuration in so_far.request.configurations():
            candidate = self._encoding.index_of_key(configuration.key)
            if candidate is not None:
                visits[candidate] = measurements.get(configuration.live)
        partial = copy(self)
        partial.pending = [candidate for candidate in self.pending if candidate not in visits]
        partial.closed = self.closed.union(visits)
        partial.measured = [
            *self.measured,
            *(
                Observation(
                    candidate,
                    Configuration(so_far.request.launch, m.as_delivered),
                    m.step_time_s,
                    m.power_W,
                    m.step_time_rse,
                    m.power_rse,
                    POWER_CAPPED in "; ".join(m.flags),
                )
                for candidate, m in visits.items()
                if m is not None
            ),
        ]
        return partial

    def _add_failure(self, candidate: int, attrs: Mapping[str, Any]) -> None:
        kind, launch = attrs.get("failure"), int(self._launch_of[candidate])
        if kind is None and "probe_id" in attrs:  # left running by a session that ended first
            return
        failure = failure_class(str(kind))
        blames = failure.blames
        if blames is not None:  # otherwise it may be proposed again
            self.closed.add(candidate)
        if blames == "launch" or (blames == "program" and self.measured):
            self.failed_launches.add(launch)
        elif blames in ("ranks", "program"):
            least = 2 if blames == "ranks" else 1
            every = zip(self._encoding.configurations, self._launch_of, strict=True)
            self.failed_launches |= {int(number) for c, number in every if c.world_size >= least}
        if failure.lacks_memory:
            self.peak_bytes[launch] = math.inf
        if kind == "not_taken":
            self.not_taken[candidate] = {
                name.removeprefix(DELIVERED): _figure(value)
                for name, value in attrs.items()
                if name.startswith(DELIVERED)
            }

    def _add_measurement(self, candidate: int, trial: FrozenTrial) -> None:
        attrs = trial.user_attrs
        self.closed.add(candidate)
        launch, peak = int(self._launch_of[candidate]), _figure(attrs.get("peak_memory_GB"))
        self.peak_bytes[launch] = np.fmax(1e9 * peak, self.peak_bytes.get(launch, math.nan))
        time, power = _figure(attrs.get("step_time_s")), _figure(attrs.get("power_W"))
        if time > 0 and power > 0:
            time_rse, power_rse = (
                _figure(attrs.get(f"{name}_rse")) for name in ("step_time", "power")
            )
            # The models learn from the delivered settings, which may differ from the requested.
            requested = self._encoding.configurations[candidate]
            live = attrs.get("delivered")
            delivered = (
                requested if live is None else Configuration(requested.launch, Settings(live))
            )
            capped = POWER_CAPPED in str(attrs.get("flags", ""))
            self.measured.append(
                Observation(candidate, delivered, time, power, time_rse, power_rse, capped)
            )


def _figure(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
