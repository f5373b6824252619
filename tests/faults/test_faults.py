"""Every fault of the table: the cheap ones always, all of them where there is time."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.faults import ray_cluster, ray_moments
from tests.faults.harness import Fault, count_losses, sentence
from tests.faults.table import all_faults, try_fault

#: The everyday suite's: one of each kind, a few seconds each. The others differ in the point at
#: which they strike.
EVERYDAY = (
    "driver killed before the trace line",
    "driver killed while its trials are added",
    "driver killed after it planned further settings",
    "Ctrl-C twice",
    "full disk",
    "second driver on the same study",
    "system time jumps",
    "journal deleted between sessions",
)
#: Those of `make long`: they strike next to where one of CI's does.
LONG = (
    "driver killed before a probe starts",
    "driver killed while a probe runs",
    "driver killed after a probe started",
    "driver killed in the middle of the trace line",
    "driver killed before its trials are added",
    "driver killed after its trials are added",
    "driver killed before it plans further settings",
    "Ctrl-C once",
    "Ctrl-C while asked what else to visit",
    "file-size limit",
    "read-only run folder",
    "PostgreSQL stops",
    "rank hangs",
    "rank closes its output",
    "rank dies of a segmentation fault",
    "rank exits",
    "Ray agent killed while it measures",
    "Ray agent killed while its probe waits to go on",
    "Ray node killed while its probe waits to go on",
)


def _check(fault: Fault) -> None:
    outcome = try_fault(fault)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.wrong == ()
    assert (outcome.lost, outcome.told_twice) == (0, 0)
    assert (outcome.clocks_wrong, outcome.processes_left, outcome.front_differs) == (0, 0, 0)
    assert outcome.said


def _named(fault: Fault) -> str:
    return fault.name


FAULTS = all_faults()
RAY = (*ray_cluster.FAULTS, *ray_moments.FAULTS)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in EVERYDAY], ids=_named)
def test_the_everyday_faults_are_survived(fault: Fault) -> None:
    _check(fault)


def _marks(fault: Fault) -> list[pytest.MarkDecorator]:
    """Return the marks for what a fault needs; those of PostgreSQL skip by themselves."""
    marks = [] if fault.fast else [pytest.mark.real]
    marks += [pytest.mark.long] * (fault.name in LONG or not fault.often)
    return [*marks, pytest.mark.ray] if fault in RAY else marks


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=_marks(f), id=f.name) for f in FAULTS if f.name not in EVERYDAY]
)
def test_every_other_fault_is_survived(fault: Fault) -> None:
    _check(fault)


def test_the_everyday_faults_exist_and_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert {*EVERYDAY, *LONG} <= set(names)


def test_the_counts_see_what_is_lost_and_what_is_told_twice(tmp_path, monkeypatch) -> None:
    """The judge itself: a ledger with more than the trace, a trace that holds a probe twice."""
    from tests.faults.driver import optimize
    from tests.faults.harness import run_of

    assert optimize(tmp_path, probes=3) == 0
    run, ledger = run_of(tmp_path), tmp_path / "ledger"
    assert count_losses(tmp_path) == (0, 0, 0)
    with ledger.open("a") as file:
        file.write("p0099 default\n")
    assert count_losses(tmp_path) == (1, 0, 0)
    lines = run.trace.read_bytes().splitlines(keepends=True)
    run.trace.write_bytes(b"".join([*lines, lines[0]]))
    assert count_losses(tmp_path)[1] == 1
    run.trace.write_bytes(b"".join(lines[1:]))
    assert count_losses(tmp_path)[0] == 2


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (("p0000 default", "# saved", "p0001 default", "# session", "p0001 default"), 0),
        # Nothing was saved of two probes: the first had the time.
        (("p0002 default", "p0001 default", "# session", "p0001 default"), 1),
        (("p0002 default", "# saved", "# session", "p0001 default"), 1),
        # The last session ended by itself.
        (("p0001 default", "# saved", "p0002 default"), 1),
        (("p0000 a", "# saved", "p0000 b", "p0000 c", "# session", "p0001 default"), 1),
    ],
)
def test_only_what_a_killed_driver_was_about_to_save_is_no_loss(
    lines: tuple[str, ...], lost: int, tmp_path
) -> None:
    from collections import Counter

    from tests.faults.harness import unsaved

    (tmp_path / "ledger").write_text("\n".join(["# session", *lines]) + "\n")
    made = Counter(tuple(line.split(" ", 1)) for line in lines if line[0] != "#")
    kept = Counter([("p0000", "default"), ("p0001", "default")])
    assert sum((made - unsaved(tmp_path / "ledger") - kept).values()) == lost


def test_a_driver_killed_before_it_saves_is_blamed_by_no_moment(tmp_path) -> None:
    """A busy machine makes a kill between a measurement and its saving likely."""
    import signal
    from unittest import mock

    from tests.faults.driver import optimize
    from tests.faults.harness import in_child
    from tuner.executors import local

    def killed(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def session() -> int:
        with mock.patch.object(local, "save_partial", killed):
            return optimize(tmp_path, probes=2)

    assert in_child(session, tmp_path).code == -signal.SIGKILL
    assert in_child(lambda: optimize(tmp_path, probes=2), tmp_path).code == 0
    assert count_losses(tmp_path)[0] == 1
    assert count_losses(tmp_path, any_moment=True)[0] == 0


def test_a_marked_process_that_stays_is_counted() -> None:
    import subprocess

    from tests.faults.harness import marked, wait_gone

    with marked() as mark:
        sleeper = subprocess.Popen(["sleep", "100"], start_new_session=True)
    assert wait_gone(mark, limit_s=0.2) == 1
    assert sleeper.wait() == -9
    assert wait_gone(mark, limit_s=0.2) == 0


def test_a_fault_that_is_given_up_leaves_neither_its_folder_nor_what_writes_there() -> None:
    """As when a test's time limit strikes: nobody waited for what the fault had started."""
    import subprocess
    import time

    from tests.faults.harness import fork, living, marked, own_folder

    words = "while :; do mkdir -p $0; date > $0/$(date +%N); done"
    with contextlib.suppress(KeyboardInterrupt), own_folder() as folder, marked() as mark:
        writer = subprocess.Popen(["sh", "-c", words, str(folder / "runs")])
        child = fork(lambda: time.sleep(100), folder / "child.out")
        while not (folder / "runs").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert writer.wait() == -9
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    time.sleep(0.1)
    assert not folder.exists()
    assert living(mark) == []


def test_fronts_are_compared_by_their_configurations_and_figures() -> None:
    from tests.faults.moments import same_front

    front = [("a", 2.0, 1.0), ("b", 1.0, 2.0)]
    assert same_front(front, [("b", 1.0, 2.0001), ("a", 2.0, 1.0)])
    for other in (None, front[:1], [*front, ("c", 1.5, 1.5)], [("a", 2.0, 1.0), ("c", 1.0, 2.0)]):
        assert not same_front(other, front)
    assert not same_front([("a", 2.0, 1.0), ("b", 1.0, 2.1)], front)


def test_a_traceback_is_no_sentence() -> None:
    assert sentence("note\ntuner: the disk is full\n") == "the disk is full"
    assert sentence("Traceback (most recent call last):\n  ...\nOSError: full") == ""
