"""Faults of the study's storage: a database that goes away, and is back for the next session.

PostgreSQL is a real server, started and stopped by the fault (Debian's package); SQLite is a file
that is taken away. The trace is on a disk of its own, so nothing that was measured depends on them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.faults.driver import continued, optimize, third, verdict
from tests.faults.harness import Fault, Outcome, in_child, run_of
from tuner.workload.records.probe import ProbeRequest


def _server_stops(folder: Path) -> Outcome:
    """PostgreSQL stops while a probe runs, and is back for the next session."""
    from tests.support.postgresql import postgresql, why_not

    if reason := why_not():
        return Outcome(skipped=reason)
    with postgresql() as server:
        session = partial(optimize, folder, storage=server.url)
        return continued(
            folder,
            partial(session, before=third(server.stop)),
            again=session,
            mend=server.start,
            expected=2,
            storage=server.url,
        )


def _connections_cut(folder: Path) -> Outcome:
    """Let the server end every connection between two probes, as a restart of it does."""
    from tests.support.postgresql import postgresql, why_not

    if reason := why_not():
        return Outcome(skipped=reason)
    with postgresql() as server:

        def strike(request: ProbeRequest) -> None:
            server.stop()
            server.start()

        session = partial(optimize, folder, storage=server.url)
        return continued(
            folder,
            partial(session, before=strike),
            again=session,
            expected=0,
            said="nothing: each call found a new connection",
            storage=server.url,
        )


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
