"""Faults of the study's storage: a database that goes away, and is back for the next session.

PostgreSQL is a real server, started and stopped by the fault (Debian's package); SQLite is a file
that is taken away. The trace is on a disk of its own, so nothing that was measured depends on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults.driver import continued, optimize, third, verdict
from tests.faults.harness import Fault, Outcome, Unavailable, in_child, run_of
from tests.support.postgresql import Server, why_not
from tests.support.postgresql import postgresql as server_of_postgresql
from tuner.workload.records.probe import ProbeRequest


@contextlib.contextmanager
def postgresql() -> Iterator[Server]:
    """Start a server of PostgreSQL, or raise `Unavailable`."""
    if reason := why_not():
        raise Unavailable(reason)
    with server_of_postgresql() as server:
        yield server


def _server_stops(folder: Path) -> Outcome:
    """PostgreSQL stops while a probe runs, and is back for the next session."""
    with postgresql() as server:
        session = partial(optimize, folder, storage=server.url)
        first = partial(session, before=third(server.stop))
        back = {"mend": server.start, "storage": server.url}
        return continued(folder, first, again=session, expected=2, **back)


def _connections_cut(folder: Path) -> Outcome:
    """Let the server end every connection between two probes, as a restart of it does."""
    with postgresql() as server:

        def strike(request: ProbeRequest) -> None:
            server.stop()
            server.start()

        session = partial(optimize, folder, storage=server.url)
        first = partial(session, before=strike)
        seen = {"said": "nothing: each call found a new connection", "storage": server.url}
        return continued(folder, first, again=session, expected=0, **seen)


def _file_taken_away(folder: Path) -> Outcome:
    """Move the database file away while a probe runs, and put it back."""
    database = folder / "study.db"
    away = folder / "elsewhere.db"
    url = f"sqlite:///{database}"

    def strike() -> None:
        database.rename(away)
        database.mkdir()  # what is there is no database

    def mend() -> None:
        database.rmdir()
        away.rename(database)

    session = partial(optimize, folder, storage=url)
    first = partial(session, before=third(strike))
    return continued(folder, first, again=session, mend=mend, expected=2, storage=url)


def _journal_deleted(folder: Path) -> Outcome:
    """Somebody deletes the journal between two sessions; the trace makes it again."""
    child = in_child(partial(optimize, folder, probes=3), folder)
    run_of(folder).journal.unlink()
    resumed = in_child(partial(optimize, folder), folder)
    words = [line for line in resumed.said.splitlines() if "added to the study" in line]
    return verdict(folder, child, resumed, expected=0, said="; ".join(words))


FAULTS: tuple[Fault, ...] = (
    Fault("journal deleted between sessions", _journal_deleted),
    Fault("database file taken away and put back", _file_taken_away),
    Fault("PostgreSQL stops", _server_stops, fast=False),
    Fault("PostgreSQL restarts before every probe", _connections_cut, fast=False),
)
