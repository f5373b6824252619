"""The Optuna study: one trial a measurement, two objectives, and resume.

The trace is the truth and the study its index: a record is on disk in the trace before the study
is told of it, and opening a study brings the two together again. What the trace holds and the
study was never told is told; what a dead driver left running becomes a failed trial that may be
asked again. The study lives in a journal beside the trace, or behind a storage URL.
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

from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from tuner.decide import Constraints
from tuner.sampler import CandidateSampler
from tuner.storage import StorageError, storage_trouble
from workload.probe import Failure, Measurement, ProbeRecord, ProbeRequest

__all__ = ["METRICS", "StudyBook", "new_driver_id", "next_probe_number"]

#: The objectives, in their order; both are minimised.
METRICS = ("energy_to_solution_kJ", "time_to_solution_s")
#: A storage that went away in the middle of a search is waited for so long, and asked so often.
STORAGE_PATIENCE_S, STORAGE_RETRY_S = 120.0, 1.0
#: A call that failed so often, with the storage answering in between, is not the storage's trouble.
STORAGE_TRIES = 5
#: `failure` of a trial whose driver died or was stopped: it says nothing of the configuration, and
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
    """A measurement as flat attributes: numbers become sortable columns of the dashboard."""
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
        **{f"delivered_{name}": value for name, value in measurement.delivered.items()},
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


class StudyBook:
    """The study of one run: asks and tells whole probes, and resumes.

    Args:
        name: the study's name in its storage.
        storage: from `open_storage`.
        sampler: the study's sampler.
        steps: optimizer steps that make the solution.
        constraints: what the user asked; written on each trial.
        driver: identity of this run's folder. Several drivers may share a storage; each resumes
            only its own trials.
        identity: digest of what is searched; a study of the same name about something else is
            refused.

    Raises:
        InputError: the storage holds a study of that name that is not this one.
    """

    def __init__(
        self,
        *,
        name: str,
        storage: optuna.storages.BaseStorage,
        sampler: CandidateSampler,
        steps: int,
        constraints: Constraints,
        driver: str,
        identity: str,
    ) -> None:
        self._sampler, self._steps, self._constraints = sampler, steps, constraints
        self._driver = driver
        self._where = f"the storage of study {name!r}"
        self._open: dict[str, dict[Configuration, Trial]] = {}
        self._records: Sequence[ProbeRecord] | None = None
        #: Called with each trial and its probe's record just before the trial is finished: the last
        #: moment at which anything can be attached to it.
        self.on_finish: Callable[[ProbeRecord, Trial], None] = lambda record, trial: None
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
    def in_memory(cls, sampler: CandidateSampler, *, steps: int = 1) -> StudyBook:
        """A study that ends with this process: a benchmark's, or a test's."""
        return cls(
            name="in memory",
            storage=optuna.storages.InMemoryStorage(),
            sampler=sampler,
            steps=steps,
            constraints=Constraints(),
            driver="this process",
            identity="in memory",
        )

    def follow(self, records: Sequence[ProbeRecord], say: Callable[[str], None]) -> None:
        """From here on wait for a storage that went away, and catch up with the trace.

        Args:
            records: the trace as it grows.
            say: told when the storage goes, and when it is back.
        """
        self._records, self._say = records, say

    def patiently(self, call: Callable[[], Opened]) -> Opened:
        """The result of `call`, which reads or writes the study, however long the storage is away.

        Raises:
            StorageError: it did not come back within STORAGE_PATIENCE_S, or nobody said `follow`,
                or the call failed STORAGE_TRIES times although it answered in between.
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
                notes = self.reconcile(self._records)
                self._say("; ".join([f"{self._where} answers again", *notes]))
                return
        raise error

    def at_once(self, call: Callable[[], Opened]) -> Opened:
        """The result of `call`, which reads or writes the study, while a launch is kept up for it.

        Raises:
            StorageError: the storage does not answer; it is not waited for.
        """
        with storage_trouble(self._where):
            return call()

    def ask(self, request: ProbeRequest) -> None:
        """Make one running trial a configuration of the probe; the sampler sees them as pending."""
        self._open[request.probe_id] = {}
        self.patiently(lambda: self._ask_each(request, request.live))

    def ask_more(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        """Make one running trial a further live setting of a probe that goes on.

        Raises:
            StorageError: the storage does not answer; it is not waited for.
        """
        self.at_once(lambda: self._ask_each(request, live))

    def _ask_each(self, request: ProbeRequest, live: Sequence[Settings]) -> None:
        trials = self._open[request.probe_id]
        for configuration in (Configuration(request.launch, one) for one in live):
            if configuration not in trials:  # else a call that failed half-way is made again
                trials[configuration] = self._ask(request, configuration)

    def go_on(self, so_far: ProbeRecord) -> tuple[Settings, ...]:
        """What else the sampler would visit in a launch that is up, asked for at once.

        Args:
            so_far: the probe, with what it measured.
        """
        plan = self._sampler.plan_on(self.study, so_far)
        if plan is None:
            return ()
        self.ask_more(so_far.request, plan.live)
        return plan.live

    def _ask(self, request: ProbeRequest, configuration: Configuration) -> Trial:
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

    def tell(self, record: ProbeRecord) -> None:
        """Finish the probe's trials: measured ones complete, the others fail.

        Call it only after the record is in the trace.
        """
        trials = self._open.pop(record.request.probe_id)
        measured = {m.live: m for m in record.measurements}
        try:
            with storage_trouble(self._where):
                for configuration, trial in trials.items():
                    self.on_finish(record, trial)
                    self._tell(record, configuration, measured.get(configuration.live), trial)
        except StorageError as error:
            self._wait_for(error)  # which tells it, for it is in the trace

    def _tell(
        self,
        record: ProbeRecord,
        configuration: Configuration,
        measurement: Measurement | None,
        trial: Trial,
    ) -> None:
        if measurement is None:
            failure = record.failure or Failure("crash", "the probe ended without this measurement")
            if configuration.live not in record.request.live:  # asked for, and never due
                failure = Failure(INTERRUPTED, "the launch ended before it heard of this setting")
            for missed in record.missed:
                if missed.live.key == trial.user_attrs.get("configuration", "").partition(" | ")[2]:
                    failure = Failure("not_taken", missed.message)
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
        """Fail every trial that this driver has open; they may be asked again."""
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
        """Bring the study to what the trace says, after whatever ended the driver before.

        Args:
            records: the trace.

        Returns:
            What was mended, one sentence each.
        """
        told = failed = 0
        with storage_trouble(self._where):
            held = {t._trial_id for trials in self._open.values() for t in trials.values()}
            trials = self._newest()
            for record in records:
                for configuration in record.request.configurations():
                    place = (record.request.probe_id, configuration.key)
                    told += self._tell_again(record, configuration, trials.pop(place, None))
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
        if told:
            notes.append(f"{told} measurement{'s' * (told != 1)} of the trace told to the study")
        if failed:
            notes.append(
                f"{failed} trial{'s' * (failed != 1)} that an earlier session left running "
                "marked interrupted"
            )
        return tuple(notes)

    def _newest(self) -> dict[tuple[str, str], FrozenTrial]:
        """This driver's trials by probe and configuration; of several the one that says most."""
        worth = {TrialState.COMPLETE: 2, TrialState.RUNNING: 1}
        trials = sorted(self._mine(), key=lambda trial: worth.get(trial.state, 0))
        return {
            (trial.user_attrs["probe_id"], trial.user_attrs["configuration"]): trial
            for trial in trials
        }

    def _tell_again(
        self, record: ProbeRecord, configuration: Configuration, known: FrozenTrial | None
    ) -> bool:
        """Tell one configuration of a record if the study was not; whether it was needed."""
        measurement = {m.live: m for m in record.measurements}.get(configuration.live)
        if known is not None and known.state == TrialState.RUNNING:
            trial = Trial(self.study, known._trial_id)
        elif known is None or (
            known.state == TrialState.FAIL
            and known.user_attrs.get("failure") == INTERRUPTED
            and measurement is not None
        ):
            trial = self._ask(record.request, configuration)
        else:
            return False
        self._tell(record, configuration, measurement, trial)
        return True

    def set_user_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Attributes of the study itself, for the dashboard."""
        with storage_trouble(self._where):
            for name, value in attrs.items():
                self.study.set_user_attr(name, value)


def new_driver_id() -> str:
    """Identity of a run folder among those that share a storage."""
    return uuid.uuid4().hex[:12]


def next_probe_number(records: Iterable[ProbeRecord], study: optuna.Study, driver: str) -> int:
    """The first number that no probe of this run bears, in the trace or among its trials."""
    names = [record.request.probe_id for record in records]
    names += [
        trial.user_attrs.get("probe_id", "")
        for trial in study.get_trials(deepcopy=False)
        if trial.user_attrs.get("driver") == driver
    ]
    numbers = [int(name[1:]) for name in names if name[:1] == "p" and name[1:].isdigit()]
    return max(numbers, default=-1) + 1
