"""The Optuna study: one trial per measurement, two objectives, and resume.

The trace is the truth and the study its index: a record is in the trace before its trials are
finished, and a session begins by adding what the study lacks. What a dead driver left running
becomes a failed trial, and its configuration may be proposed again. The study is kept in a journal
beside the trace, or behind a storage URL; it belongs to one run folder.
"""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from tuner.problem.constraints import Constraints
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


def _set_constraints(trial: Trial, values: Mapping[str, float]) -> None:
    """Record constraint values (0 or less is feasible), each by its name.

    optuna-dashboard 0.21 reads only the list that Optuna 4 wrote under the system attribute
    "constraints"; it is written as well, and Optuna reads it back as keys "0", "1", ... of the
    same sign. This is the one place that knows.
    """
    if not values:
        return
    for name, value in values.items():
        trial.set_constraint(name, value)
    trial.storage.set_trial_system_attr(trial._trial_id, "constraints", list(values.values()))


def _measured_attrs(record: ProbeRecord, measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as flat attributes: numbers are sortable columns of the dashboard."""
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


class StudyRecorder:
    """The study of one run: starts and finishes the trials of whole probes, and resumes.

    Args:
        steps: optimizer steps that make the solution.
        constraints: limits on the training job; written on each trial.
        identity: digest of what is searched; a study of the same name about something else is
            refused.
        driver: identity of the run folder in a database, where the study of another run folder is
            refused; None for a journal in the run folder, which has a lock.

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
        driver: str | None = None,
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
            owner = self.study.user_attrs.get("driver", driver)
            if driver is not None and owner != driver:
                raise InputError(
                    f"the storage already holds a study {name!r} of another run folder; continue "
                    "it there, or give another name"
                )
            self.study.set_user_attr("identity", identity)
            if driver is not None:
                self.study.set_user_attr("driver", driver)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(list(METRICS))

    @classmethod
    def in_memory(cls, sampler: ProbePlanner, *, steps: int = 1) -> StudyRecorder:
        """Return a study that ends with this process, for benchmarks and tests."""
        return cls(
            name="in memory",
            storage=optuna.storages.InMemoryStorage(),
            sampler=sampler,
            steps=steps,
            constraints=Constraints(),
            identity="in memory",
        )

    def start(self, request: ProbeRequest) -> None:
        """Start one trial per configuration of the probe; the sampler sees them as pending."""
        self._open[request.probe_id] = {}
        self._start_each(request, request.live)

    def extend(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        """Start one trial per further live setting of a running probe."""
        self._start_each(request, live)

    def _start_each(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        trials = self._open[request.probe_id]
        with storage_trouble(self.where):
            for configuration in (Configuration(request.launch, one) for one in live):
                trials[configuration] = self._start_trial(request, configuration)

    def next_settings(self, so_far: ProbeRecord) -> tuple[Settings, ...]:
        """Return what else the sampler would visit in a running launch, with its trials started."""
        plan = self._sampler.plan_continuation(self.study, so_far)
        if plan is None:
            return ()
        self.extend(so_far.request, plan.live)
        return plan.live

    def _start_trial(self, request: ProbeRequest, configuration: Configuration) -> Trial:
        attrs = {
            "configuration": configuration.key,
            "probe_id": request.probe_id,
            "purpose": request.purpose,
        }
        params = self._sampler.params_of(configuration)
        distributions = self._sampler.distributions()
        try:
            running = optuna.trial.create_trial(
                state=TrialState.RUNNING,
                params=params,
                distributions={name: distributions[name] for name in params},
                user_attrs=attrs,
            )
        except ValueError as error:
            raise InputError(
                f"probe {request.probe_id} has {configuration.key[:120]!r}, which is none of the "
                "study's configurations; its trace is another study's, or was edited"
            ) from error
        # NOTE: not enqueue_trial() and ask(): a crash between them would leave a trial waiting.
        study_id = self.study._study_id
        number = self.study._storage.create_new_trial(study_id, template_trial=running)
        return Trial(self.study, number)

    def finish(self, record: ProbeRecord) -> None:
        """Finish the probe's trials: measured ones complete, the others fail.

        Call it only after the record is in the trace.
        """
        trials = self._open.pop(record.request.probe_id)
        measured = {m.live: m for m in record.measurements}
        with storage_trouble(self.where):
            for configuration, trial in trials.items():
                self._finish_trial(record, configuration, measured.get(configuration.live), trial)

    def _finish_trial(
        self,
        record: ProbeRecord,
        configuration: Configuration,
        measurement: Measurement | None,
        trial: Trial,
    ) -> None:
        if measurement is None:
            failure = record.failure or Failure("crash", "the probe ended without this measurement")
            if configuration.live not in record.request.live:  # started, and never due
                failure = Failure(INTERRUPTED, "the launch ended before it reached this setting")
            for missed in record.missed:
                if missed.live.key == configuration.live.key:
                    failure = Failure("not_taken", missed.message)
                    for name, value in missed.delivered.items():
                        trial.set_user_attr(f"{DELIVERED}{name}", value)
            self._fail(trial, failure.kind, failure.message)
            return
        for name, value in _measured_attrs(record, measurement).items():
            trial.set_user_attr(name, value)
        energy_kJ = measurement.energy_per_step_J * self._steps / 1000
        time_s = measurement.step_time_s * self._steps
        excess = self._constraints.excess(
            energy_kJ, time_s, measurement.power_W, gpus=configuration.world_size
        )
        _set_constraints(trial, excess)
        self.study.tell(trial, [energy_kJ, time_s])

    def _fail(self, trial: Trial, kind: str, message: str) -> None:
        trial.set_user_attr("failure", kind)
        trial.set_user_attr("failure_message", message[:500])
        self.study.tell(trial, state=TrialState.FAIL)

    def interrupt(self, why: str) -> None:
        """Fail every open trial; their configurations may be proposed again."""
        with storage_trouble(self.where):
            for trials in self._open.values():
                for trial in trials.values():
                    self._fail(trial, INTERRUPTED, f"interrupted: {why}")
        self._open.clear()

    def catch_up(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Bring the study in line with the trace, however the session before ended.

        Returns:
            Sentences on what was changed.
        """
        added = failed = 0
        with storage_trouble(self.where):
            trials = self._newest()
            for record in records:
                for configuration in record.request.configurations():
                    place = (record.request.probe_id, configuration.key)
                    added += self._finish_again(record, configuration, trials.get(place))
            for trial in self._probed():
                if trial.state == TrialState.RUNNING:
                    failed += 1
                    self._fail(
                        Trial(self.study, trial._trial_id),
                        INTERRUPTED,
                        "interrupted: the session that started it ended first",
                    )
        notes = []
        if added:
            notes.append(f"{added} measurement{'s' * (added != 1)} of the trace added to the study")
        if failed:
            notes.append(
                f"{failed} trial{'s' * (failed != 1)} that an earlier session left running "
                "marked interrupted"
            )
        return tuple(notes)

    def _probed(self) -> list[FrozenTrial]:
        """Return the trials of probes; what a user adds to the study has no probe."""
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if "probe_id" in trial.user_attrs]

    def _newest(self) -> dict[tuple[str, str], FrozenTrial]:
        """Return the trials by probe and configuration; of several the most complete."""
        worth = {TrialState.COMPLETE: 2, TrialState.RUNNING: 1}
        trials = sorted(self._probed(), key=lambda trial: worth.get(trial.state, 0))
        return {
            (trial.user_attrs["probe_id"], trial.user_attrs["configuration"]): trial
            for trial in trials
        }

    def _finish_again(
        self, record: ProbeRecord, configuration: Configuration, existing: FrozenTrial | None
    ) -> bool:
        """Finish the trial of a configuration if it is not finished; return whether it was."""
        measurement = {m.live: m for m in record.measurements}.get(configuration.live)
        if existing is not None and existing.state == TrialState.RUNNING:
            trial = Trial(self.study, existing._trial_id)
        elif existing is None or (
            existing.state == TrialState.FAIL
            and existing.user_attrs.get("failure") == INTERRUPTED
            and measurement is not None
        ):
            trial = self._start_trial(record.request, configuration)
        else:
            return False
        self._finish_trial(record, configuration, measurement, trial)
        return True


def new_driver_id() -> str:
    """Return a new identity of a run folder."""
    return uuid.uuid4().hex[:12]


def next_probe_number(records: Iterable[ProbeRecord], study: optuna.Study) -> int:
    """Return the first number that no probe has, in the trace or the study."""
    names = [record.request.probe_id for record in records]
    names += [t.user_attrs.get("probe_id", "") for t in study.get_trials(deepcopy=False)]
    numbers = [int(name[1:]) for name in names if name[:1] == "p" and name[1:].isdigit()]
    return max(numbers, default=-1) + 1
