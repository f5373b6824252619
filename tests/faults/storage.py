"""Faults of the study's storage: a database that goes away, and comes back or does not.

PostgreSQL is a real server, started and stopped by the fault (Debian's package); SQLite is a file
that is taken away. The trace is on a disk of its own, so nothing that was measured depends on them.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from tests.faults.driver import AT, optimize, verdict
from tests.faults.harness import Child, Fault, Outcome, in_child
from tuner.workload.probe import ProbeRequest

__all__ = ["FAULTS"]


def _server_restarts(folder: Path, *, away_s: float, patience_s: float) -> Outcome:
    """PostgreSQL stops while a probe runs, and comes back before or after patience is over."""
    from tuner.testing.postgresql import postgresql, why_not

    if reason := why_not():
        return Outcome(skipped=reason)
    with postgresql() as server:
        back: list[threading.Timer] = []

        def strike(request: ProbeRequest) -> None:
            if request.probe_id == f"p{AT:04d}":
                server.stop()
                if away_s < patience_s:
                    back.append(threading.Timer(away_s, server.start))
                    back[0].start()

        session = partial(optimize, folder, storage=server.url, patience_s=patience_s)
        child = in_child(partial(session, before=strike), folder)
        expected = 0
        if away_s >= patience_s:
            server.start()
            expected = 2
        resumed = in_child(session, folder)
        words = [line for line in child.said.splitlines() if "answer" in line]
        said = "; ".join(words[-2:])
        outcome = verdict(folder, child, resumed, expected=expected, said=said, storage=server.url)
        if "s3cret" in child.said + resumed.said:
            return Outcome(wrong=("the password was shown",))
        return outcome


def _connections_cut(folder: Path) -> Outcome:
    """Let the server end every connection between two probes, as a restart of it does."""
    from tuner.testing.postgresql import postgresql, why_not

    if reason := why_not():
        return Outcome(skipped=reason)
    with postgresql() as server:

        def strike(request: ProbeRequest) -> None:
            server.stop()
            server.start()

        session = partial(optimize, folder, storage=server.url, patience_s=20.0)
        child = in_child(partial(session, before=strike), folder)
        resumed = in_child(session, folder)
        said = "nothing: each call found a new connection"
        return verdict(folder, child, resumed, expected=0, said=said, storage=server.url)


def _file_taken_away(folder: Path) -> Outcome:
    """Move the database file away while a probe runs, and put it back."""
    database = folder / "study.db"
    away = folder / "elsewhere.db"
    url = f"sqlite:///{database}"

    def strike(request: ProbeRequest) -> None:
        if request.probe_id == f"p{AT:04d}":
            database.rename(away)
            database.mkdir()  # what is there is no database

            def put_back() -> None:
                time.sleep(2.0)
                database.rmdir()
                away.rename(database)

            threading.Thread(target=put_back).start()

    session = partial(optimize, folder, storage=url, patience_s=20.0)
    child = in_child(partial(session, before=strike), folder)
    resumed = in_child(session, folder)
    words = [line for line in child.said.splitlines() if "answer" in line]
    return verdict(folder, child, resumed, expected=0, said="; ".join(words[-2:]), storage=url)


def _journal_deleted(folder: Path) -> Outcome:
    """Somebody deletes the journal between two sessions; the trace makes it again."""
    from tests.faults.driver import run_of

    child = in_child(partial(optimize, folder, probes=3), folder)
    run_of(folder).journal.unlink()
    resumed = in_child(partial(optimize, folder), folder)
    words = [line for line in resumed.said.splitlines() if "added to the study" in line]
    return verdict(folder, child, resumed, expected=0, said="; ".join(words))


def _second_on_one_storage(folder: Path) -> Outcome:
    """Let a second driver, with a run folder of its own, join the study of the first."""
    from tuner.testing.postgresql import postgresql, why_not

    if reason := why_not():
        return Outcome(skipped=reason)
    with postgresql() as server:
        other = folder / "other"
        other.mkdir()

        def strike(request: ProbeRequest) -> None:
            if request.probe_id == f"p{AT:04d}":
                joined = in_child(partial(optimize, other, storage=server.url), folder)
                (folder / "joined").write_text(f"{joined.code} {joined.said}")

        session = partial(optimize, folder, storage=server.url)
        child = in_child(partial(session, before=strike), folder)
        resumed = in_child(session, folder)
        second = Child(0, (folder / "joined").read_text())
        both = [
            verdict(place, one, one, expected=0, said="it joined", storage=server.url)
            for place, one in ((folder, child), (other, second))
        ]
        lost, twice = sum(o.lost for o in both), sum(o.told_twice for o in both)
        wrong = tuple(phrase for outcome in both for phrase in outcome.wrong)
        if not resumed.said.strip().endswith("done 5"):
            wrong = (*wrong, f"not resumed: {resumed}")
        said = "nothing: it joined the study, each with its own trials"
        return Outcome(said=said, lost=lost, told_twice=twice, wrong=wrong)


FAULTS: tuple[Fault, ...] = (
    Fault("journal deleted between sessions", _journal_deleted),
    Fault("database file taken away and put back", _file_taken_away),
    Fault(
        "PostgreSQL goes away and comes back",
        partial(_server_restarts, away_s=3.0, patience_s=30.0),
        fast=False,
    ),
    Fault(
        "PostgreSQL stays away",
        partial(_server_restarts, away_s=9.0, patience_s=2.0),
        fast=False,
    ),
    Fault("PostgreSQL restarts before every probe", _connections_cut, fast=False),
    Fault("second driver on one PostgreSQL", _second_on_one_storage, fast=False),
)
