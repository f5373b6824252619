"""The Optuna study: one trial per measurement, two objectives, and resume.

The trace is the truth and the study its index: a record is in the trace before its trials are
told, and a session begins by adding what the study lacks. What a dead driver left running becomes a
failed trial, and its configuration may be proposed again. The study is kept in a journal beside the
trace, or behind a storage URL; it belongs to one run folder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tuner.problem.constraints import Constraints
from tuner.problem.limits import JobFigures
from tuner.search.observations import DELIVERED
from tuner.search.planner import ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.storage import storage_trouble
from tuner.workload.probe import Failure, Measurement, ProbeRecord, ProbeRequest

#: The objectives, in their order; both are minimised.
METRICS = ("energy_to_solution_kJ", "time_to_solution_s")
#: `failure` of a trial whose driver died or was stopped: it is not the configuration's fault, and
#: the sampler may propose it again.
INTERRUPTED: Final = "cancelled"


def _measured_attrs(record: ProbeRecord, measurement: Measurement) -> dict[str, Any]:
    attrs: dict[str, Any] = {
        "step_time_s": measurement.step_time_s,
        "power_W": measurement.power_W,
        "step_time_rse": measurement.step_time_rse,
        "power_rse": measurement.power_rse,
        "steps": measurement.steps,
        "window_s": measurement.window_s,
        "window_J": measurement.energy_J,
        "probe_kJ": record.energy_J / 1000,
        "temperature_C": measurement.temperature_C,
        "peak_memory_GB": (measurement.peak_memory_bytes or math.nan) / 1e9,
        "scope": record.meter.scope,
        "meter": record.meter.name,
        "estimated": record.meter.estimated,
        **({"twin": True} if record.meter.twin else {}),
        **{f"{DELIVERED}{name}": value for name, value in measurement.delivered.items()},
    }
    if measurement.as_delivered != measurement.live:
        attrs["delivered"] = measurement.as_delivered.to_json()
    if measurement.flags:
        attrs["flags"] = "; ".join(measurement.flags)
    return {
        name: value
        for name, value in attrs.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


@dataclass(frozen=True)
class _Outcome:
    """What the study keeps of one configuration of a probe; without values it failed."""

    attrs: Mapping[str, Any]
    values: tuple[float, float] | None = None
    constraints: Mapping[str, float] = field(default_factory=dict)

    @property
    def state(self) -> TrialState:
        return TrialState.FAIL if self.values is None else TrialState.COMPLETE

    @property
    def system_attrs(self) -> dict[str, list[float]]:
        """The list that Optuna 4 wrote, which is all that optuna-dashboard 0.21 reads.

        Optuna reads it back as constraints "0", "1", ... of the same sign.
        """
        return {"constraints": list(self.constraints.values())} if self.constraints else {}


class StudyRecorder:
    """The study of one run: asks and tells the trials of whole probes, and resumes.

    Raises:
        InputError: the storage holds a study of that name that is not this one.
    """

    def __init__(
        self,
        *,
        name: str,
        storage: optuna.storages.BaseStorage,
        sampler: ProbePlanner,
        steps: int,
        constraints: Constraints,
        identity: str,
    ) -> None:
        self._sampler, self._steps, self._constraints = sampler, steps, constraints
        #: What messages call the storage (`tuner.storage.storage_trouble`).
        self.where = f"the storage of study {name!r}"
        self._open: dict[str, dict[Configuration, Trial]] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with storage_trouble(self.where):
            self.study = optuna.create_study(
                storage=storage,
                study_name=name,
                directions=["minimize", "minimize"],
                sampler=sampler,
                load_if_exists=True,
            )
            if len(self.study.directions) != 2 or (
                self.study.user_attrs.get("identity", identity) != identity
            ):
                raise InputError(
                    f"the storage already holds a study {name!r} about another job, cluster or "
                    "space; give another name"
                )
            self.study.set_user_attr("identity", identity)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(list(METRICS))

    def start(self, request: ProbeRequest, further: Sequence[Settings] = ()) -> None:
        """Start a trial per live setting of a probe, which the sampler sees as pending; of a
        running one per `further` setting."""
        trials = self._open.setdefault(request.probe_id, {})
        with storage_trouble(self.where):
            for live in further or request.live:
                configuration = Configuration(request.launch, live)
                trial = trials[configuration] = self._ask_for(request, configuration)
                for name, value in _identity(request, configuration).items():
                    trial.set_user_attr(name, value)

    def _ask_for(self, request: ProbeRequest, configuration: Configuration) -> Trial:
        params, known = self._params_of(request, configuration)
        while True:
            self._sampler.propose(configuration)
            trial = self.study.ask(known)
            if trial.params == params:
                return trial
            why = Failure(INTERRUPTED, "not probed: --try names what is to be probed first")
            self._tell(trial, _Outcome(_failure_attrs(why)))

    def _params_of(
        self, request: ProbeRequest, configuration: Configuration
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        params, known = self._sampler.params_of(configuration), self._sampler.distributions()
        try:
            create_trial(state=TrialState.FAIL, params=params, distributions=known)
        except ValueError as error:
            raise InputError(
                f"probe {request.probe_id} has {configuration.key[:120]!r}, which is none of the "
                "study's configurations; its trace is another study's, or was edited"
            ) from error
        return params, known

    def finish(self, record: ProbeRecord) -> None:
        """Finish the probe's trials: measured ones complete, the others fail.

        Call it only after the record is in the trace.
        """
        with storage_trouble(self.where):
            for configuration, trial in self._open.pop(record.request.probe_id).items():
                self._tell(trial, self._outcome(record, configuration))

    def _tell(self, trial: Trial, outcome: _Outcome) -> None:
        for name, value in outcome.attrs.items():
            trial.set_user_attr(name, value)
        for name, excess in outcome.constraints.items():
            trial.set_constraint(name, excess)
        for name, excesses in outcome.system_attrs.items():
            trial.storage.set_trial_system_attr(trial._trial_id, name, excesses)
        self.study.tell(trial, outcome.values, state=outcome.state)

    def _outcome(self, record: ProbeRecord, configuration: Configuration) -> _Outcome:
        measurement = {m.live: m for m in record.measurements}.get(configuration.live)
        if measurement is None:
            failure = record.failure or Failure("crash", "the probe ended without this measurement")
            if configuration.live not in record.request.live:  # started, and never due
                failure = Failure(INTERRUPTED, "the launch ended before it reached this setting")
            delivered: Mapping[str, float] = {}
            for missed in record.missed:
                if missed.live.key == configuration.live.key:
                    failure, delivered = Failure("not_taken", missed.message), missed.delivered
            clocks = {f"{DELIVERED}{name}": value for name, value in delivered.items()}
            return _Outcome({**clocks, **_failure_attrs(failure)})
        energy_kJ = measurement.energy_per_step_J * self._steps / 1000
        time_s = measurement.step_time_s * self._steps
        job = JobFigures(energy_kJ, time_s, measurement.power_W, gpus=configuration.world_size)
        ratios = self._constraints.limits.ratios(job)
        excess = {name: ratio - 1 for name, ratio in ratios.items()}
        return _Outcome(_measured_attrs(record, measurement), (energy_kJ, time_s), excess)

    def interrupt(self, why: str) -> None:
        """Fail every open trial; their configurations may be proposed again."""
        lost = _Outcome(_failure_attrs(Failure(INTERRUPTED, f"interrupted: {why}")))
        with storage_trouble(self.where):
            for trials in self._open.values():
                for trial in trials.values():
                    self._tell(trial, lost)
        self._open.clear()

    def catch_up(self, records: Sequence[ProbeRecord], *, shared: bool = False) -> tuple[str, ...]:
        """Bring the study in line with the trace; return sentences on what was changed.

        Args:
            shared: run folders share the storage, and another one may have a study of this name.

        Raises:
            InputError: the study is another run folder's: none of its measurements is in the
                trace; or the trace holds configurations that the study cannot have.
        """
        due = {
            (r.request.probe_id, c.key): (r, c) for r in records for c in r.request.configurations()
        }
        with storage_trouble(self.where):
            trials = self.study.get_trials(deepcopy=False)
            measured = {_place(trial) for trial in trials if trial.state == TrialState.COMPLETE}
            if shared and measured - {None} and measured.isdisjoint(due):
                raise InputError(
                    f"the storage already holds a study {self.study.study_name!r} of another run "
                    "folder; continue it there, or give another name"
                )
            running = [trial.number for trial in trials if trial.state == TrialState.RUNNING]
            for number in running:
                self.study.tell(number, state=TrialState.FAIL)
            told = measured | {
                _place(trial)
                for trial in trials
                if trial.state == TrialState.FAIL
                and trial.user_attrs.get("failure", INTERRUPTED) != INTERRUPTED
            }
            missing = [place for place in due if place not in told]
            for place in missing:
                self._add(*due[place])
        notes = (
            (len(missing), "measurement", "of the trace added to the study"),
            (len(running), "trial", "that an earlier session left running marked interrupted"),
        )
        return tuple(f"{n} {what}{'s' * (n != 1)} {done}" for n, what, done in notes if n)

    def _add(self, record: ProbeRecord, configuration: Configuration) -> None:
        outcome = self._outcome(record, configuration)
        params, known = self._params_of(record.request, configuration)
        trial = create_trial(
            state=outcome.state,
            values=outcome.values,
            params=params,
            distributions=known,
            user_attrs={**_identity(record.request, configuration), **outcome.attrs},
            system_attrs=outcome.system_attrs,
            constraints=dict(outcome.constraints),
        )
        self.study.add_trial(trial)


def _identity(request: ProbeRequest, configuration: Configuration) -> dict[str, Any]:
    return {
        "configuration": configuration.key,
        "probe_id": request.probe_id,
        "purpose": request.purpose,
    }


def _place(trial: FrozenTrial) -> tuple[str, str] | None:
    attrs = trial.user_attrs
    return (attrs["probe_id"], attrs["configuration"]) if "probe_id" in attrs else None


def _failure_attrs(failure: Failure) -> dict[str, str]:
    return {"failure": failure.kind, "failure_message": failure.message[:500]}


def next_probe_number(records: Iterable[ProbeRecord], study: optuna.Study) -> int:
    """Return the first number that no probe has, in the trace or the study."""
    names = [record.request.probe_id for record in records]
    names += [t.user_attrs.get("probe_id", "") for t in study.get_trials(deepcopy=False)]
    numbers = [int(name[1:]) for name in names if name[:1] == "p" and name[1:].isdigit()]
    return max(numbers, default=-1) + 1
