"""Storage of a study: a journal beside the trace, or a database behind a URL.

Errors name the fault of a URL, a driver or a server in a sentence, by its host and database alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import one_line
from tuner.search_spaces.plugins import install_command
from tuner.search_spaces.safe_files import open_plain, private_folder
from tuner.workload.records.trace import repair_torn_tail

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
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if url is None:
        return ""
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
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if url is None:
        try:
            return _open_journal(journal)
        except (OSError, ValueError, KeyError) as error:
            again = "; the trace holds every probe: remove it, and the same command makes it again"
            raise InputError(
                f"the journal {journal} cannot be opened: {one_line(str(error))[:200]}"
                + again * isinstance(error, ValueError | KeyError)
            ) from error
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
