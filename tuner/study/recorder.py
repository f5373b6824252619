"""The Optuna study: one trial per measurement, two objectives, and resume.

The trace is the truth and the study its index: a record is in the trace before its trials are
finished, and opening a study reconciles the two. Measurements that the study lacks are added; what
a dead driver left running becomes a failed trial, and its configuration may be proposed again. The
study is kept in a journal beside the trace, or behind a storage URL.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from tuner.problem.constraints import Constraints
from tuner.search.observations import DELIVERED
from tuner.search.planner import ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.storage import StorageError, storage_trouble
from tuner.workload.probe import Failure, Measurement, ProbeRecord, ProbeRequest

__all__ = ["METRICS", "StudyRecorder", "new_driver_id", "next_probe_number"]

#: The objectives, in their order; both are minimised.
METRICS = ("energy_to_solution_kJ", "time_to_solution_s")
#: Longest wait for a storage that stopped answering during a search, and time between tries.
STORAGE_PATIENCE_S, STORAGE_RETRY_S = 120.0, 1.0
#: A call that fails this many times although the storage answers is not the storage's fault.
STORAGE_TRIES = 5
#: `failure` of a trial whose driver died or was stopped: it is not the configuration's fault, and
#: the sampler may propose it again.
INTERRUPTED: Final = "cancelled"

Opened = TypeVar("Opened")


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
        name: the study's name in its storage.
        storage: from `open_storage`.
        sampler: the study's sampler.
        steps: optimizer steps that make the solution.
        constraints: limits on the training job; written on each trial.
        driver: identity of this run's folder. Several drivers may share a storage; each resumes
            only its own trials.
        identity: digest of what is searched; a study of the same name about something else is
            refused.
        on_finish: called with each trial and its probe's record just before the trial is finished:
            the last moment at which anything can be attached to it.

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
        driver: str,
        identity: str,
        on_finish: Callable[[ProbeRecord, Trial], None] = lambda record, trial: None,
    ) -> None:
        self._sampler, self._steps, self._constraints = sampler, steps, constraints
        self._driver = driver
        self._where = f"the storage of study {name!r}"
        self._open: dict[str, dict[Configuration, Trial]] = {}
        self._records: Callable[[], Sequence[ProbeRecord]] | None = None
        self._on_finish = on_finish
        self._say: Callable[[str], None] = lambda sentence: None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with storage_trouble(self._where):
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

    @classmethod
    def in_memory(cls, sampler: ProbePlanner, *, steps: int = 1) -> StudyRecorder:
        """Return a study that ends with this process, for benchmarks and tests."""
        return cls(
            name="in memory",
            storage=optuna.storages.InMemoryStorage(),
            sampler=sampler,
            steps=steps,
            constraints=Constraints(),
            driver="this process",
            identity="in memory",
        )

    def follow(
        self, records: Callable[[], Sequence[ProbeRecord]], say: Callable[[str], None]
    ) -> None:
        """Wait, from now on, for a storage that stops answering, and then add what the trace holds.

        Args:
            records: returns the trace so far.
            say: called with a sentence when the storage goes, and when it is back.
        """
        self._records, self._say = records, say

    def patiently(self, call: Callable[[], Opened]) -> Opened:
        """Return the result of `call`, which reads or writes the study, waiting for the storage.

        Raises:
            StorageError: it did not answer within STORAGE_PATIENCE_S, `follow` was not called, or
                the call failed STORAGE_TRIES times although it answered in between.
        """
        for last in (*[False] * (STORAGE_TRIES - 1), True):
            try:
                with storage_trouble(self._where):
                    return call()
            except StorageError as error:
                if last:
                    raise
                self._wait_for(error)
        raise AssertionError

    def _wait_for(self, error: StorageError) -> None:
        """Wait until the storage answers and holds what the trace does; raise `error` if never."""
        if self._records is None:
            raise error
        self._say(f"{error}; waiting up to {STORAGE_PATIENCE_S:g} s for it")
        until = time.monotonic() + STORAGE_PATIENCE_S
        while time.monotonic() < until:
            time.sleep(STORAGE_RETRY_S)
            with contextlib.suppress(StorageError):
                notes = self.reconcile(self._records())
                self._say("; ".join([f"{self._where} answers again", *notes]))
                return
        raise error

    def at_once(self, call: Callable[[], Opened]) -> Opened:
        """Return the result of `call`, which reads or writes the study while a launch waits.

        Raises:
            StorageError: the storage does not answer; it is not waited for.
        """
        with storage_trouble(self._where):
            return call()

    def start(self, request: ProbeRequest) -> None:
        """Start one trial per configuration of the probe; the sampler sees them as pending."""
        self._open[request.probe_id] = {}
        self.patiently(lambda: self._start_each(request, request.live))

    def extend(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        """Start one trial per further live setting of a running probe.

        Raises:
            StorageError: the storage does not answer; it is not waited for.
        """
        self.at_once(lambda: self._start_each(request, live))

    def _start_each(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        trials = self._open[request.probe_id]
        for configuration in (Configuration(request.launch, one) for one in live):
            if configuration not in trials:  # else a call that failed half-way is made again
                trials[configuration] = self._start_trial(request, configuration)

    def next_settings(self, so_far: ProbeRecord) -> tuple[Settings, ...]:
        """Return what else the sampler would visit in a running launch, with its trials started.

        Args:
            so_far: the probe, with its measurements.
        """
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
            "driver": self._driver,
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
        # NOTE: not enqueue_trial() and ask(): of two drivers on one storage each could pop what
        # the other queued, and a crash between the two calls would leave a trial waiting.
        study_id = self.study._study_id
        number = self.study._storage.create_new_trial(study_id, template_trial=running)
        return Trial(self.study, number)

    def finish(self, record: ProbeRecord) -> None:
        """Finish the probe's trials: measured ones complete, the others fail.

        Call it only after the record is in the trace.
        """
        trials = self._open.pop(record.request.probe_id)
        measured = {m.live: m for m in record.measurements}
        try:
            with storage_trouble(self._where):
                for configuration, trial in trials.items():
                    self._on_finish(record, trial)
                    self._finish_trial(
                        record, configuration, measured.get(configuration.live), trial
                    )
        except StorageError as error:
            self._wait_for(error)  # which tells it, for it is in the trace

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
        """Fail every open trial of this driver; their configurations may be proposed again."""
        with storage_trouble(self._where):
            for trials in self._open.values():
                for trial in trials.values():
                    self._fail(trial, INTERRUPTED, f"interrupted: {why}")
        self._open.clear()

    def _mine(self) -> list[FrozenTrial]:
        return [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if trial.user_attrs.get("driver") == self._driver
        ]

    def reconcile(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Bring the study in line with the trace, however the driver before ended.

        Args:
            records: the trace.

        Returns:
            Sentences on what was changed.
        """
        added = failed = 0
        with storage_trouble(self._where):
            held = {t._trial_id for trials in self._open.values() for t in trials.values()}
            trials = self._newest()
            for record in records:
                for configuration in record.request.configurations():
                    place = (record.request.probe_id, configuration.key)
                    added += self._finish_again(record, configuration, trials.pop(place, None))
            # Of one configuration there may be two: a call that failed may have made its trial.
            for trial in self._mine():
                if trial.state == TrialState.RUNNING and trial._trial_id not in held:
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

    def _newest(self) -> dict[tuple[str, str], FrozenTrial]:
        """Return this driver's trials by probe and configuration; of several the most complete."""
        worth = {TrialState.COMPLETE: 2, TrialState.RUNNING: 1}
        trials = sorted(self._mine(), key=lambda trial: worth.get(trial.state, 0))
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
    """Return a new identity of a run folder among those that share a storage."""
    return uuid.uuid4().hex[:12]


def next_probe_number(records: Iterable[ProbeRecord], study: optuna.Study, driver: str) -> int:
    """Return the first number that no probe of this run has, in the trace or the study."""
    names = [record.request.probe_id for record in records]
    names += [
        trial.user_attrs.get("probe_id", "")
        for trial in study.get_trials(deepcopy=False)
        if trial.user_attrs.get("driver") == driver
    ]
    numbers = [int(name[1:]) for name in names if name[:1] == "p" and name[1:].isdigit()]
    return max(numbers, default=-1) + 1
