"""What a study says of the candidates: measured, failed, in flight.

Each finished trial is read once. A measured candidate is closed, and so is one that failed by its
own fault; a failure that blames the launch closes all its live settings; one that blames neither
leaves the candidate open.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from optuna.trial import TrialState

from search_spaces.configuration import Configuration, Settings
from tuner.named import NamedCandidates
from workload.probe import Measurement, ProbeRecord

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

__all__ = ["LAUNCH_FAILURES", "NO_BLAME", "Seen", "Told"]

#: A failure of one of these kinds is the launch's: its other live settings would fail as well.
LAUNCH_FAILURES = frozenset({"refused", "out_of_memory", "crash", "hang", "time_limit"})
#: Failures that say nothing of the configuration: it may be proposed again.
NO_BLAME = frozenset({"cancelled", "node"})


@dataclass(frozen=True)
class Told:
    """One finished measurement: candidate, what really ran, and figures."""

    candidate: int
    ran: Configuration
    step_time_s: float
    power_W: float
    step_time_rse: float
    power_rse: float


class Seen:
    """A study's trials as far as they are about the candidates.

    Args:
        names: the candidates.
        launch_of: each candidate's launch, as a number.

    Attributes:
        told: the measurements, in the order of the trials.
        closed: candidates never to be proposed again.
        failed_launches: launches none of whose settings is.
        pending: candidates in flight.
        peaks: launch -> peak bytes; infinite where it ran out of memory, NaN where it told none.
    """

    def __init__(self, names: NamedCandidates, launch_of: np.ndarray) -> None:
        self._names, self._launch_of = names, launch_of
        self._parsed: set[int] = set()
        self.told: list[Told] = []
        self.closed: set[int] = set()
        self.failed_launches: set[int] = set()
        self.pending: list[int] = []
        self.peaks: dict[int, float] = {}

    def update(self, study: Study) -> None:
        """Read what the study was told since, and what is in flight now."""
        self.pending = []
        for trial in study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING)
        ):
            if trial.number in self._parsed:
                continue
            candidate = self._names.candidate_of(trial)
            if trial.state == TrialState.RUNNING:
                if candidate is not None:
                    self.pending.append(candidate)
                continue
            self._parsed.add(trial.number)
            if candidate is None:
                continue
            if trial.state == TrialState.FAIL:
                self._failed(candidate, trial.user_attrs.get("failure"))
            else:
                self._measured(candidate, trial)

    def with_measured(self, so_far: ProbeRecord) -> Seen:
        """As it would be if the probe ended with what it has measured."""
        seen = copy(self)
        measured = {m.live: m for m in so_far.measurements}
        asked: dict[int, Measurement | None] = {}
        for configuration in so_far.request.configurations():
            candidate = self._names.candidate_named(configuration.key)
            if candidate is not None:
                asked[candidate] = measured.get(configuration.live)
        seen.pending = [candidate for candidate in self.pending if candidate not in asked]
        seen.closed = self.closed.union(asked)
        seen.told = [
            *self.told,
            *(
                Told(
                    candidate,
                    Configuration(so_far.request.launch, m.as_delivered),
                    m.step_time_s,
                    m.power_W,
                    m.step_time_rse,
                    m.power_rse,
                )
                for candidate, m in asked.items()
                if m is not None
            ),
        ]
        return seen

    def _failed(self, candidate: int, failure: str | None) -> None:
        launch = int(self._launch_of[candidate])
        if failure not in NO_BLAME:
            self.closed.add(candidate)
        if failure in LAUNCH_FAILURES:
            self.failed_launches.add(launch)
        if failure == "out_of_memory":
            self.peaks[launch] = math.inf

    def _measured(self, candidate: int, trial: FrozenTrial) -> None:
        attrs = trial.user_attrs
        self.closed.add(candidate)
        launch, peak = int(self._launch_of[candidate]), _figure(attrs.get("peak_memory_GB"))
        self.peaks[launch] = np.fmax(1e9 * peak, self.peaks.get(launch, math.nan))
        time, power = _figure(attrs.get("step_time_s")), _figure(attrs.get("power_W"))
        if time > 0 and power > 0:
            rse = (_figure(attrs.get(f"{name}_rse")) for name in ("step_time", "power"))
            # The models learn from what was delivered, which a request may not be.
            asked = self._names.configurations[candidate]
            live = attrs.get("delivered")
            ran = asked if live is None else Configuration(asked.launch, Settings(live))
            self.told.append(Told(candidate, ran, time, power, *rse))


def _figure(value: object) -> float:
    """A number from a trial's attribute; NaN for none."""
    return float(value) if isinstance(value, int | float) else math.nan
