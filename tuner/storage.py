"""Storage of a study: a journal beside the trace, or a database behind a URL.

Errors name the fault of a URL, a driver or a server in a sentence, without a password.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import open_plain
from tuner.workload.node.rights import private_folder
from tuner.workload.trace import repair_torn_tail

#: A storage that has not answered after this many seconds counts as not answering.
STORAGE_TIMEOUT_S = 8.0
#: A lock of the journal that was not touched for this long is a dead driver's.
JOURNAL_GRACE_S = 5

Opened = TypeVar("Opened")


class StorageError(InputError):
    """The study's storage stopped answering; every finished probe is in the trace."""


def without_password(text: str, url: str = "") -> str:
    """`text` with the passwords that a storage URL may carry replaced by ***.

    Args:
        url: the URL whose password may stand in the text by itself.
    """
    secrets = re.findall(r"://[^/@:\s]*:(.+)@", url)
    secrets += re.findall(r"(?i)(?:password|passwd|pwd)=([^&\s]+)", url)
    for secret in secrets:
        for spelt in {secret, unquote(secret)}:
            text = text.replace(spelt, "***")
    text = re.sub(r"(//[^/@:\s]*:)[^@\s]+@", r"\1***@", text)
    text = re.sub(r":[^:@/]+@", ":***@", text)  # in what is no URL, too
    return re.sub(r"(?i)((?:password|passwd|pwd)=)[^&\s]+", r"\1***", text)


def _within(timeout_s: float, what: str, call: Callable[[], Opened]) -> Opened:
    """Return the result of `call`; raise one sentence if it fails or takes too long."""
    answer: list[Opened] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="open storage")
    thread.start()
    thread.join(timeout_s)
    if answer:
        return answer[0]
    if not errors:
        raise InputError(f"{what} did not answer within {timeout_s:g} s; is it up and reachable?")
    error = errors[0]
    if isinstance(error, InputError):
        raise error
    if isinstance(error, ImportError):
        raise InputError(
            f"{what} needs a driver that is not installed "
            f"({getattr(error, 'name', None) or error}); for PostgreSQL install "
            "joulefront[postgresql], for MySQL install pymysql"
        ) from error
    reason = " ".join(str(error).split()) or type(error).__name__
    raise InputError(f"{what} cannot be opened: {reason[:200]}") from error


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


def open_storage(url: str | None, journal: Path) -> optuna.storages.BaseStorage:
    """Open the storage of a study.

    Args:
        url: a database, as SQLAlchemy names it ("sqlite:///study.db", "postgresql://host/name");
            None for the journal.
        journal: the journal's file; a torn last line is put aside first.

    Raises:
        InputError: the URL is malformed, its driver is not installed, or it does not answer within
            STORAGE_TIMEOUT_S seconds; or the journal cannot be read.
    """
    if url is None:
        try:
            return _within(45.0, f"the journal {journal}", lambda: _open_journal(journal))
        except InputError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            raise InputError(
                f"{error}; the trace holds every probe: remove it, and the same command makes it "
                "again"
            ) from error
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InputError(
            f"storage {without_password(url)!r} is not a URL; it must be like sqlite:///study.db "
            "or postgresql://user@host/name"
        ) from error
    shown = without_password(parsed.render_as_string(hide_password=True))
    options = _engine_options(parsed.get_backend_name(), parsed.query)
    if parsed.drivername in _DRIVERS:
        for driver in _DRIVERS[parsed.drivername]:
            if importlib.util.find_spec(driver[0]) is not None:
                parsed = parsed.set(drivername=f"{parsed.drivername}+{driver[1]}")
                break
    address = parsed.render_as_string(hide_password=False)
    try:
        return _within(
            STORAGE_TIMEOUT_S, f"storage {shown!r}", lambda: _open_database(address, options)
        )
    except InputError as error:
        raise InputError(without_password(str(error), url)) from None


#: Modules that speak to a server, and what SQLAlchemy calls them: the first that is installed is
#: taken where a URL names none. SQLAlchemy's own choice changed between its releases.
_DRIVERS = {
    "postgresql": (("psycopg2", "psycopg2"), ("psycopg", "psycopg")),
    "mysql": (("pymysql", "pymysql"), ("MySQLdb", "mysqldb")),
    "mariadb": (("pymysql", "pymysql"), ("MySQLdb", "mysqldb")),
}


def _engine_options(backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return SQLAlchemy's connection options, so that a lost server is noticed.

    A connection is tried before it is used; PostgreSQL's are given up after some 20 s of silence
    (libpq's parameters), where the URL does not say otherwise; SQLite waits for another writer.
    """
    if backend == "sqlite":
        return {"connect_args": {"timeout": 30}}
    options: dict[str, Any] = {"pool_pre_ping": True}
    if backend == "postgresql":
        wanted = {
            "connect_timeout": int(STORAGE_TIMEOUT_S),
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            "tcp_user_timeout": 20_000,
        }
        options["connect_args"] = {k: v for k, v in wanted.items() if k not in given}
    return options


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
        known = isinstance(error, StorageInternalError | SQLAlchemyError)
        if not known and not _raised_by_storage(error):
            raise
        reason = " ".join(str(error.__cause__ or error).split())
        raise StorageError(
            f"{where} stopped answering ({reason[:160]}); every finished probe is in the trace, "
            "so the same command continues from here once it answers"
        ) from error
