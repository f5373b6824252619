"""Candidates as Optuna parameters, and observations of them: measured, failed, in flight.

A parameter is a knob that varies. Integers at even steps are integer ranges, which stock samplers
and the dashboard can order. A live knob that may be left to the device has the level None. A trial
belongs to the candidate whose key, or else whose parameters, it carries.

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
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from tuner.models.surrogate.features import varying_knobs
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidConfiguration, UnknownName
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.probe import Measurement, ProbeRecord, failure_class

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from tuner.search_spaces.space import Candidates

#: Begins the names of a trial's attributes that hold what the devices did.
DELIVERED = "delivered_"
#: Begins the flag of a window in which the power limit of a device was active.
POWER_CAPPED = "throttle_power"


class ParameterEncoding:
    """Mapping between candidates, their Optuna parameters and their keys."""

    def __init__(self, candidates: Candidates) -> None:
        self.configurations = candidates.configurations
        whole = candidates.whole.configurations
        self.knobs = varying_knobs(whole)
        levels = {
            name: list(dict.fromkeys(_as_param(c.get(name)) for c in whole)) for name in self.knobs
        }
        self.distributions = {name: _distribution(name, each) for name, each in levels.items()}
        self._of_key = {c.key: i for i, c in enumerate(self.configurations)}
        self._of_params: dict[tuple[Any, ...], int] = {}
        for i, configuration in enumerate(self.configurations):
            params = self.params_of(configuration)
            self._of_params.setdefault(tuple(params[name] for name in self.knobs), i)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration as trial parameters, one per knob of `distributions`."""
        return {name: _as_param(configuration.get(name)) for name in self.knobs}

    def index_of_params(self, params: dict[str, Any]) -> int | None:
        """Return the number of the candidate with these parameters, or None."""
        for name in self.knobs:
            if name not in params:
                raise UnknownName("parameter", name, params)
        return self._of_params.get(tuple(params[name] for name in self.knobs))

    def configuration_of(self, params: dict[str, Any]) -> Configuration:
        """Return the candidate with these parameters, else raise InvalidConfiguration."""
        index = self.index_of_params(params)
        if index is None:
            text = " ".join(f"{name}={value}" for name, value in params.items())
            raise InvalidConfiguration(text, ["it is not among the candidates"])
        return self.configurations[index]

    def index_of_key(self, key: str) -> int | None:
        """Return the number of the candidate with this key, or None."""
        return self._of_key.get(key)

    def index_of_trial(self, trial: FrozenTrial) -> int | None:
        """Return the number of the candidate that a trial belongs to, or None."""
        key = trial.user_attrs.get("configuration")
        if key is not None:
            return self.index_of_key(key)
        if not self.knobs or any(name not in trial.params for name in self.knobs):
            return None
        return self.index_of_params(trial.params)


def _as_param(value: object) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _distribution(name: str, levels: list[Any]) -> BaseDistribution:
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in levels)
    if integers and not (name in KNOBS and KNOBS[name].scale == "category"):
        steps = {b - a for a, b in zip(sorted(levels)[:-1], sorted(levels)[1:], strict=True)}
        if len(steps) == 1:
            return IntDistribution(min(levels), max(levels), step=steps.pop())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels)
    return CategoricalDistribution(sorted(levels) if numbers else sorted(levels, key=_level_order))


def _level_order(level: Any) -> tuple[int, float, str]:
    if level is None:
        return (0, 0.0, "")
    if isinstance(level, int | float):
        return (1, float(level), "")
    return (2, 0.0, str(level))


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
    """Measurements, failures and pending trials of the candidates."""

    def __init__(self, encoding: ParameterEncoding, launch_of: np.ndarray) -> None:
        self._encoding, self._launch_of = encoding, launch_of
        self._parsed: set[int] = set()
        self.measured: list[Observation] = []
        self.closed: set[int] = set()
        self.failed_launches: set[int] = set()
        self.pending: list[int] = []
        # Peak memory by launch; infinite if it ran out of memory, NaN if not measured.
        self.peak_bytes: dict[int, float] = {}
        # Of candidates that the devices did not run as set, the clocks at which they ran, by name
        # ("clock_MHz", of a stage "clock_MHz.0").
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
            if candidate is not None:
                add = self._add_failure if trial.state == TrialState.FAIL else self._add_measurement
                add(candidate, trial.user_attrs)

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

    def _add_measurement(self, candidate: int, attrs: Mapping[str, Any]) -> None:
        self.closed.add(candidate)
        launch, peak = int(self._launch_of[candidate]), _figure(attrs.get("peak_memory_GB"))
        self.peak_bytes[launch] = np.fmax(1e9 * peak, self.peak_bytes.get(launch, math.nan))
        time, power = _figure(attrs.get("step_time_s")), _figure(attrs.get("power_W"))
        if time > 0 and power > 0:
            time_rse, power_rse = (_figure(attrs.get(f"{n}_rse")) for n in ("step_time", "power"))
            # The models learn from the delivered settings, which may differ from the requested.
            delivered = self._encoding.configurations[candidate]
            if (live := attrs.get("delivered")) is not None:
                delivered = Configuration(delivered.launch, Settings(live))
            capped = POWER_CAPPED in str(attrs.get("flags", ""))
            self.measured.append(
                Observation(candidate, delivered, time, power, time_rse, power_rse, capped)
            )


def _figure(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
