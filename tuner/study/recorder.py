"""The Optuna study: an index of the trace, one trial per configuration of a probe, two objectives.

The trace is the truth: a record is in it before its trials are added, and a session begins by
adding the trials that the study lacks. Nothing is decided by what the study holds. It is kept in a
journal beside the trace, or behind a storage URL, for optuna-dashboard and Optuna's own tools.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.problem.constraints import Constraints, JobFigures
from tuner.search.sampler import ParameterEncoding
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import one_line
from tuner.search_spaces.plugins import install_command
from tuner.search_spaces.safe_files import open_plain, private_folder
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Failure, Measurement, ProbeRecord
from tuner.workload.records.trace import repair_torn_tail

# Storage of a study: a journal beside the trace, or a database behind a URL.
#
# Errors name the fault of a URL, a driver or a server in a sentence, by its host and database
# alone.


#: A lock of the journal that was not touched for this long is a dead driver's.
JOURNAL_GRACE_S = 5


class StorageError(InputError):
    """The study's storage stopped answering; every finished probe is in the trace."""


def _open_journal(journal: Path) -> optuna.storages.BaseStorage:
    private_folder(journal.parent)
    os.close(open_plain(journal, os.O_CREAT))  # Optuna would follow a link
    repair_torn_tail(journal)
    # A killed writer leaves its lock, which Optuna breaks after 30 s. But only the driver, which
    # holds the run folder, and a user's clicks in the dashboard write here, each for milliseconds.
    lock = JournalFileSymlinkLock(str(journal), grace_period=JOURNAL_GRACE_S)
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))


def _open_database(address: str, options: dict[str, Any]) -> optuna.storages.BaseStorage:
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    for last in (False, False, True):
        try:
            return optuna.storages.RDBStorage(address, engine_kwargs=options)
        except (IntegrityError, ProgrammingError):
            # Two drivers that make the tables at once: the second finds them made.
            if last:
                raise
            time.sleep(0.5)
    raise AssertionError


def storage_name(url: str | None) -> str:
    """Return the driver, host and database of a storage's URL without user, password and options;
    "" for the journal of the run folder.

    The file of SQLite is absolute: from another folder, the same URL is another database.
    """
    if url is None:  # SQLAlchemy takes as long to import as a small program to start
        return ""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return ""  # open_storage refuses it
    database = parsed.database or ""
    if parsed.drivername.startswith("sqlite") and database and not database.startswith(":"):
        database = os.path.abspath(database)
    return f"{parsed.drivername}://{parsed.host or ''}/{database}"


def open_storage(url: str | None, journal: Path) -> optuna.storages.BaseStorage:
    """Open the storage of a study.

    Args:
        url: a database, as SQLAlchemy names it ("sqlite:///study.db", "postgresql://host/name");
            None for the journal.
        journal: the journal's file; a torn last line is put aside first.

    Raises:
        InputError: the URL is malformed, its driver is not installed, or it does not answer; or
            the journal cannot be read.
    """
    if url is None:
        try:
            return _open_journal(journal)
        except (OSError, ValueError, KeyError) as error:
            again = "; the trace holds every probe: remove it, and the same command makes it again"
            raise InputError(
                f"the journal {journal} cannot be opened: {one_line(str(error))[:200]}"
                + again * isinstance(error, ValueError | KeyError)
            ) from error
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InputError(
            "the storage is not a URL; it must be like sqlite:///study.db or "
            "postgresql://user@host/name"
        ) from error
    shown = f"{parsed.drivername}://{parsed.host or ''}/{parsed.database or ''}"
    options: dict[str, Any] = {"pool_pre_ping": True}  # so that a lost server is noticed
    if parsed.drivername == "postgresql" and importlib.util.find_spec("psycopg2"):
        # That of joulefront[postgresql]; SQLAlchemy 2.1 would ask for psycopg.
        parsed = parsed.set(drivername="postgresql+psycopg2")
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": 30}  # for another writer
    try:
        return _open_database(parsed.render_as_string(hide_password=False), options)
    except ImportError as error:
        driver = getattr(error.__cause__, "name", None) or error
        raise InputError(
            f"storage {shown} needs a driver that is not installed ({driver}); "
            f"for PostgreSQL: {install_command('postgresql')}"
        ) from error
    except Exception as error:  # of SQLAlchemy, the driver or Optuna
        raise InputError(
            f"storage {shown} cannot be opened: {one_line(str(error))[:200]}"
        ) from None


def _raised_by_storage(error: Exception) -> bool:
    """Return True if a storage of Optuna raised the error because it does not work.

    A KeyError is its word for a study or trial that is no longer there, a RuntimeError for a lock
    of the journal that cannot be made, a ValueError for a line of it that is no JSON, an OSError
    for its files. A trial that is finished already is no trouble of the storage's.
    """
    if isinstance(error, optuna.exceptions.UpdateFinishedTrialError):
        return False
    frames = list(traceback.extract_tb(error.__traceback__))
    # Who opens a file for a storage may be the standard library.
    frames = frames if isinstance(error, OSError) else frames[-1:]
    return any(f"{os.sep}optuna{os.sep}storages{os.sep}" in frame.filename for frame in frames)


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that an error follows from, such as one of a lock not given back."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__cause__ or behind.__context__
    return behind


@contextlib.contextmanager
def storage_trouble(where: str) -> Iterator[None]:
    """Turn a storage that stops answering into one sentence.

    Raises:
        StorageError: what is done inside failed because of the storage; another error goes out as
            it is.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except InputError:
        raise
    except (
        StorageInternalError,
        SQLAlchemyError,
        OSError,
        KeyError,
        RuntimeError,
        ValueError,
    ) as error:
        if (interrupt := _interrupt_behind(error)) is not None:
            raise interrupt from None
        is_storage_error = isinstance(error, StorageInternalError | SQLAlchemyError)
        if not is_storage_error and not _raised_by_storage(error):
            raise
        reason = " ".join(str(error.__cause__ or error).split())
        raise StorageError(
            f"{where} stopped answering ({reason[:160]}); every finished probe is in the trace, "
            "so the same command continues from here once it answers"
        ) from error


#: The objectives, in their order; both are minimised. Of time alone there is the second.
METRICS = ("energy_to_solution_kJ", "time_to_solution_s")


class StudyRecorder:
    """The study of one run, written as its probes finish.

    Raises:
        InputError: the storage holds a study of that name that is not this one.
    """

    def __init__(
        self,
        *,
        name: str,
        storage: optuna.storages.BaseStorage,
        candidates: Candidates,
        steps: int,
        constraints: Constraints,
        has_energy: bool = True,
    ) -> None:
        metrics = METRICS if has_energy else METRICS[1:]
        self._encoding = ParameterEncoding(candidates)
        self._steps, self._constraints = steps, constraints
        #: What messages call the storage (`tuner.study.recorder.storage_trouble`).
        self.where = f"the storage of study {name!r}"
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with storage_trouble(self.where):
            self.study = optuna.create_study(
                storage=storage,
                study_name=name,
                directions=["minimize"] * len(metrics),
                sampler=RandomSampler(),
                load_if_exists=True,
            )
            trials = {p: t for t in self.study.get_trials(deepcopy=False) if (p := _place(t))}
            self._present = set(trials)
            knobs = self._encoding.distributions
            if len(self.study.directions) != len(metrics) or any(
                trial.distributions != knobs for trial in trials.values()
            ):
                raise InputError(
                    f"the storage already holds a study {name!r} about another job, cluster or "
                    "space; give another name"
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(list(metrics))

    def add(self, record: ProbeRecord) -> None:
        """Add the probe's trials: measured ones are complete, the others failed.

        Call it only after the record is in the trace.
        """
        with storage_trouble(self.where):
            for configuration in record.request.configurations():
                self.study.add_trial(self._trial(record, configuration))

    def catch_up(self, records: Sequence[ProbeRecord], *, shared: bool = False) -> tuple[str, ...]:
        """Add the trials of the trace that the study lacks; return sentences on the changes.

        Args:
            shared: run folders share the storage, and another one may have a study of this name.

        Raises:
            InputError: the study is another run folder's: none of its trials is in the trace; or
                the trace holds configurations that the study cannot have.
        """
        due = {
            (r.request.probe_id, c.key): (r, c) for r in records for c in r.request.configurations()
        }
        if shared and self._present and self._present.isdisjoint(due):
            raise InputError(
                f"the storage already holds a study {self.study.study_name!r} of another run "
                "folder; continue it there, or give another name"
            )
        missing = [place for place in due if place not in self._present]
        with storage_trouble(self.where):
            for place in missing:
                self.study.add_trial(self._trial(*due[place]))
        if not missing:
            return ()
        count = f"{len(missing)} measurement{'s' * (len(missing) != 1)}"
        return (f"{count} of the trace added to the study",)

    def next_probe_number(self, names: Iterable[str]) -> int:
        """Return the first number that neither these probes nor the study's trials have."""
        every = [*names, *(name for name, _ in self._present)]
        numbers = [int(name[1:]) for name in every if re.fullmatch(r"p\d+", name)]
        return max(numbers, default=-1) + 1

    def _trial(self, record: ProbeRecord, configuration: Configuration) -> FrozenTrial:
        values: tuple[float, ...] | None = None
        excess: Mapping[str, float] = {}
        measurement = {m.live: m for m in record.measurements}.get(configuration.live)
        if measurement is None:
            attrs = _failure_attrs(record, configuration)
        else:
            attrs = _measured_attrs(record, measurement)
            energy_kJ = measurement.energy_per_step_J * self._steps / 1000
            time_s = measurement.step_time_s * self._steps
            values = (energy_kJ, time_s) if record.meter.has_energy else (time_s,)
            power_W = measurement.power_W
            job = JobFigures(energy_kJ, time_s, power_W, gpus=configuration.world_size)
            ratios = self._constraints.limits.ratios(job)
            excess = {name: ratio - 1 for name, ratio in ratios.items()}
        identity = {
            "configuration": configuration.key,
            "probe_id": record.request.probe_id,
            "purpose": record.request.purpose,
        }
        try:
            trial = create_trial(
                state=TrialState.FAIL if values is None else TrialState.COMPLETE,
                values=values,
                params=self._encoding.params_of(configuration),
                distributions=self._encoding.distributions,
                user_attrs={**identity, **attrs},
                constraints=dict(excess),
            )
        except ValueError as error:
            raise InputError(
                f"probe {record.request.probe_id} has {configuration.key[:120]!r}, which is none "
                "of the study's configurations; its trace is another study's, or was edited"
            ) from error
        if trial.datetime_complete is not None:
            trial.datetime_start = trial.datetime_complete - timedelta(seconds=record.wall_s)
        return trial


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
        **record.meter.marks,
        **{f"delivered_{name}": value for name, value in measurement.delivered.items()},
    }
    attrs = record.meter.known(attrs)
    if measurement.flags:
        attrs["flags"] = "; ".join(measurement.flags)
    return {
        name: value
        for name, value in attrs.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def _failure_attrs(record: ProbeRecord, configuration: Configuration) -> dict[str, Any]:
    failure = record.failure or Failure("crash", "the probe ended without this measurement")
    delivered: Mapping[str, float] = {}
    for missed in record.missed:
        if missed.live == configuration.live:
            failure, delivered = Failure("not_taken", missed.message), missed.delivered
    return {
        **{f"delivered_{name}": value for name, value in delivered.items()},
        "failure": failure.kind,
        "failure_message": failure.message[:500],
    }


def _place(trial: FrozenTrial) -> tuple[str, str] | None:
    attrs = trial.user_attrs
    return (attrs["probe_id"], attrs["configuration"]) if "probe_id" in attrs else None
