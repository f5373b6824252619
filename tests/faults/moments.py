"""Faults that strike at random moments of a small search, which must end as if nothing happened.

The search is a real one in a child process, over a runner whose figures follow from the launch by
a law: every launch is on the front, and none predicts another. The search that nothing disturbed
says which front is right and how long it takes; each fault strikes a search of its own at a moment
that is drawn from its name and number, whatever the driver does just then. The same command is
then given again, and the front has to be the same, with nothing lost or recorded twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.driver import KILLED, optimize
from tests.faults.harness import (
    MARK,
    Child,
    Fault,
    Outcome,
    fill,
    fork,
    joined,
    marked,
    outcome_of,
    own_folder,
    sentence,
    small_disk,
    wait_gone,
)
from tests.faults.storage import postgresql
from tests.support.studies import FormulaRunner, measured
from tuner.executors.base import Executor
from tuner.search_spaces.safe_files import PREFIX, SHORT_PREFIX
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

CLUSTER = "h200-8"
SPACE = """what = "of the faults at random moments"
[knobs]
data_parallel = [1, 2, 4]
micro_batch = [1, 2]
"""
#: More than the space has launches, with those that faults cost, which else would leave too few to
#: measure the baseline again; at least so many points has the front.
PROBES, LEAST_POINTS = 16, 5
#: A probe takes so long, so that faults strike probes, too, seconds.
PROBE_S = 0.2
#: Figures of a point of both fronts may differ by so much.
TOLERANCE = 1e-3
#: A search that is struck before its end is looked for so often.
TRIES = 4


class LawRunner(FormulaRunner):
    """Answers by a law: what is slower by some share takes less energy by the same share."""

    def run(self, request: ProbeRequest) -> ProbeRecord:
        time.sleep(PROBE_S)
        share = zlib.crc32(request.launch.key.encode()) / 2**32
        step_s, energy_J = 1.0 + share, 200.0 * (2.0 - share)
        windows = tuple(
            measured(c.live, time_s=step_s, power_W=energy_J / step_s)
            for c in request.configurations()
        )
        spent_J = sum(window.energy_J for window in windows)
        return ProbeRecord(request, windows, self.meter, wall_s=20.0, energy_J=spent_J)


Point = tuple[str, float, float]


def session(
    folder: Path,
    storage: str | None = None,
    executor: Callable[[], Executor] | None = None,
) -> int:
    """One session of the search, as the command runs it; prints the front at its end."""
    if (folder / "clock").exists():
        _take_clock(folder / "clock")
    space = folder / "space.toml"
    space.write_text(SPACE)
    return optimize(
        folder,
        storage=storage,
        probes=PROBES,
        cluster=CLUSTER,
        space=str(space),
        model=LawRunner,
        executor=executor,
    )


#: One session of a search in a folder, with the URL of its storage; returns its exit code.
Session = Callable[[Path, str | None], int]


def front_of(child: Child) -> list[Point] | None:
    """Return the front that a session printed at its end."""
    lines = [line for line in child.said.splitlines() if line.startswith("front ")]
    return [tuple(point) for point in json.loads(lines[-1][6:])] if lines else None


def same_front(one: list[Point] | None, other: list[Point] | None) -> bool:
    """Return True if both fronts have the same configurations with the same figures."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        a[0] == b[0] and all(abs(x / y - 1) <= TOLERANCE for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(sorted(one), sorted(other), strict=True)
    )


@dataclass
class Search:
    """A search in a folder of its own, and the driver that runs it.

    Attributes:
        folder: holds the run, the ledger and the drivers' outputs.
        session: what each driver runs.
        storage: URL of the database; None for the journal.
        driver: process of the last driver.
    """

    folder: Path
    session: Session
    storage: str | None = None
    driver: int = 0
    _out: Path = Path()
    _sessions: int = 0

    def __post_init__(self) -> None:
        (self.folder / "tmp").mkdir()
        (self.folder / "ledger").touch()

    def start(self) -> None:
        """Start a session."""
        self._sessions += 1
        self._out = self.folder / f"session-{self._sessions}.out"
        self.driver = fork(self._run, self._out)

    def _run(self) -> int:
        os.environ["TMPDIR"] = str(self.folder / "tmp")
        tempfile.tempdir = None
        return self.session(self.folder, self.storage)

    def ended_within(self, limit_s: float) -> bool:
        """Wait; return True if the session ended, without asking for its exit code."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            if os.waitid(os.P_PID, self.driver, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.005)
        return False

    def end(self) -> Child:
        """Wait for the session's end."""
        return joined(self.driver, self._out, limit_s=240.0)

    def finish(self) -> Child:
        """Run the same once more, to its end."""
        self.start()
        return self.end()


#: Prepares the folder of a search; the URL of its storage, or `Unavailable`.
Prepare = Callable[[Path], contextlib.AbstractContextManager[str | None]]


@contextlib.contextmanager
def journal(folder: Path) -> Iterator[str | None]:
    """Leave the study in the journal."""
    yield None


@functools.cache
def reference(run: Session, needs: Prepare = journal) -> tuple[list[Point] | None, float]:
    """Return the front of the search that nothing disturbs, and the seconds that it takes.

    None in the front's place: its figures are measured, and another search has others.
    """
    with own_folder() as folder, needs(folder), marked() as mark:
        search = Search(folder, run)
        began_s = time.monotonic()
        child = search.finish()
        lasts_s = time.monotonic() - began_s
        front = front_of(child)
        short = front is not None and len(front) < LEAST_POINTS
        unsaid = front is None and run is session
        if child.code or short or unsaid or wait_gone(mark):
            raise AssertionError(f"the undisturbed search failed: {child}")
        return front, lasts_s


#: Strikes a search that runs, and waits for the end of its driver if it ends; the undoing of what
#: would be in the way of the next session.
Strike = Callable[[Search, random.Random], Callable[[], None]]


class Missed(Exception):
    """The search ended before there was anything to strike."""


def _none(folder: Path) -> int:
    return 0


@dataclass(frozen=True)
class Kind:
    """Faults of one kind: how often, what each does, and what it needs.

    Attributes:
        name: of the faults; draws their moments, with the number.
        times: the number of moments.
        strike: causes the fault.
        prepare: makes the storage, or the disk.
        codes: the exit codes that the driver may have.
        session: of the search that is struck.
        needs: prepares what the session needs, struck or not.
        clocks_wrong: counts the GPUs whose clocks are not what they were before the search.
        agents_left: counts what a search left that no mark is in: agents of Ray.
        fast, often: as in `Fault`; `often` is of the first moment alone.
    """

    name: str
    times: int
    strike: Strike
    prepare: Prepare = journal
    codes: tuple[int, ...] = (0, 2)
    session: Session = session
    needs: Prepare = journal
    clocks_wrong: Callable[[Path], int] = _none
    agents_left: Callable[[Path], int] = _none
    fast: bool = True
    often: bool = False

    def faults(self) -> list[Fault]:
        """Return the faults, one a moment."""
        return [
            Fault(
                f"{self.name}, moment {number}",
                partial(self._strike, number),
                fast=self.fast,
                often=number == 1 and self.often,
            )
            for number in range(1, self.times + 1)
        ]

    def _strike(self, number: int, folder: Path) -> Outcome:
        """Strike a search once; judge what was left and how it went on."""
        _, lasts_s = reference(self.session, self.needs)
        draw = random.Random(f"{self.name} {number}")
        for attempt in range(TRIES):
            inner = folder / str(attempt)
            inner.mkdir()
            with (
                self.needs(inner),
                self.prepare(inner) as storage,
                marked() as mark,
                contextlib.suppress(Missed),
            ):
                search = Search(inner, self.session, storage)
                search.start()
                # Earlier with each try: the machine may be less busy than it was.
                if search.ended_within(draw.uniform(0.0, lasts_s) / (attempt + 1)):
                    search.end()
                    continue
                undo = self.strike(search, draw)
                try:
                    child = search.end()
                    left, clocks = wait_gone(mark), self.clocks_wrong(inner)
                finally:
                    undo()
                if child.code == 0 and 0 not in self.codes:
                    continue  # it ended by itself, just before it was struck
                again = search.finish()
                left, clocks = left + wait_gone(mark), clocks + self.clocks_wrong(inner)
                left += self.agents_left(inner)
                return replace(
                    self._judged(search, child, again), processes_left=left, clocks_wrong=clocks
                )
        return Outcome(wrong=("every search ended before it was struck",))

    def _judged(self, search: Search, child: Child, again: Child) -> Outcome:
        expected, _ = reference(self.session, self.needs)
        folders = [
            path.name
            for path in (search.folder / "tmp").iterdir()
            if path.name.startswith((PREFIX, SHORT_PREFIX))
        ]
        said = child.said + again.said
        told = child.code not in (1, 2) or bool(sentence(child.said))
        front = front_of(again)
        differs = expected is not None and not same_front(front, expected)
        return outcome_of(
            search.folder,
            (not folders, f"temporary folders were left: {folders}"),
            (child.code in self.codes, f"it ended with {child.code}: {child.said[-300:]}"),
            ("Traceback" not in said, f"a traceback was shown: {said[-600:]}"),
            (told, "it ended without a sentence"),
            (again.code == 0, f"not continued: {again.code} {again.said[-300:]}"),
            said=f"{front} instead of {expected}; {again.said[-1500:]}"
            if differs
            else sentence(child.said) or "nothing: the same command continued",
            front_differs=int(differs),
            storage=search.storage,
            any_moment=True,
        )


# ---- the driver


def _nothing() -> None:
    """Undo nothing."""


def _kill(search: Search, draw: random.Random) -> Callable[[], None]:
    os.kill(search.driver, signal.SIGKILL)
    return _nothing


def _kill_again(search: Search, draw: random.Random) -> Callable[[], None]:
    """Kill the next two drivers, too, each after some time of its own."""
    _kill(search, draw)
    for _ in range(2):
        search.end()
        search.start()
        search.ended_within(draw.uniform(0.0, 0.5) * reference(search.session, journal)[1])
        with contextlib.suppress(ProcessLookupError):
            _kill(search, draw)
    return _nothing


def _pause(search: Search, draw: random.Random) -> Callable[[], None]:
    """Stop the driver, as Ctrl-Z or a snapshot of the machine does, and continue it."""
    os.kill(search.driver, signal.SIGSTOP)
    time.sleep(draw.uniform(0.1, 1.5))
    os.kill(search.driver, signal.SIGCONT)
    return _nothing


def _second(search: Search, draw: random.Random) -> Callable[[], None]:
    """Start the same command again: it is refused, or finds the search ended."""
    out = search.folder / "second.out"
    second = joined(fork(partial(session, search.folder, search.storage), out), out)
    if second.code == 2 and "being run by process" not in second.said:
        raise AssertionError(f"the second search was refused otherwise: {second}")
    if second.code not in (0, 2):
        raise AssertionError(f"the second search failed: {second}")
    return _nothing


# ---- the disk


@contextlib.contextmanager
def _on_small_disk(folder: Path) -> Iterator[None]:
    with small_disk(folder):
        yield None


def _fill(search: Search, draw: random.Random) -> Callable[[], None]:
    return fill(search.folder / "runs").unlink


def _read_only(search: Search, draw: random.Random) -> Callable[[], None]:
    runs = str(search.folder / "runs")
    subprocess.run(["mount", "--bind", runs, runs], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", runs], check=True)

    def writable() -> None:
        subprocess.run(["umount", "-l", runs], check=True)

    return writable


# ---- the storage


@contextlib.contextmanager
def _sqlite(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder / 'study.db'}"


def _take_database(search: Search, draw: random.Random) -> Callable[[], None]:
    """Move the file away, so that a folder is in its place, and put it back at the end."""
    database, away = search.folder / "study.db", search.folder / "away.db"
    existed = database.exists()
    if existed:
        database.rename(away)
    database.mkdir()

    def undo() -> None:
        shutil.rmtree(database)
        if existed:
            away.rename(database)

    return undo


@contextlib.contextmanager
def _postgresql(folder: Path) -> Iterator[str]:
    with postgresql() as server:
        _servers[folder] = server
        yield server.url


_servers: dict[Path, Any] = {}


def _stop_server(search: Search, draw: random.Random) -> Callable[[], None]:
    """Stop the server, and start it again, mostly while the search still runs."""
    server = _servers[search.folder]
    server.stop()
    search.ended_within(draw.uniform(0.0, 3.0))
    mark = os.environ.pop(MARK)  # the server is nothing that the search left
    server.start()
    os.environ[MARK] = mark
    return _nothing


# ---- the system's clock


@contextlib.contextmanager
def _own_clock(folder: Path) -> Iterator[None]:
    """Let the search look at a clock of its own, which a file sets."""
    (folder / "clock").write_text("0")
    yield None


def _take_clock(file: Path) -> None:
    """Set this process's clock by a file, seconds to add; the monotonic one goes on."""
    real_ns = time.time_ns

    def shifted_ns() -> int:
        return real_ns() + int(float(file.read_text() or 0) * 1e9)

    time.time_ns = shifted_ns
    time.time = lambda: shifted_ns() / 1e9


def _set_clock(search: Search, draw: random.Random) -> Callable[[], None]:
    """Set the clock forward or back by up to a year, and then to another time or right again."""
    for _ in range(3):
        days = draw.choice((-1, 1)) * draw.choice((0.01, 1, 365))
        (search.folder / "clock").write_text(str(days * 86400))
        if search.ended_within(draw.uniform(0.0, 2.0)):
            break
    (search.folder / "clock").write_text("0")
    return _nothing


KINDS: tuple[Kind, ...] = (
    Kind("driver killed", 12, _kill, codes=(KILLED,), often=True),
    Kind("driver killed, SQLite", 4, _kill, _sqlite, codes=(KILLED,)),
    Kind("three drivers killed", 4, _kill_again, codes=(0, KILLED)),
    Kind("driver stopped and continued", 2, _pause),
    Kind("two searches of one name", 4, _second),
    Kind("disk full", 10, _fill, _on_small_disk),
    Kind("runs folder read-only", 10, _read_only, _on_small_disk),
    Kind("SQLite taken away and back", 4, _take_database, _sqlite),
    Kind("clock set forward and back", 6, _set_clock, _own_clock, codes=(0,)),
    Kind("PostgreSQL stopped and started", 4, _stop_server, _postgresql),
)
FAULTS: tuple[Fault, ...] = tuple(fault for kind in KINDS for fault in kind.faults())
