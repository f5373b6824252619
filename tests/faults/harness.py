"""Harness of the faults: runners that keep a ledger, killed children, and counts of the losses.

A fault is one function that causes it for real, in a folder of its own, and says what was seen.
The driver that is killed runs in a child process; what its runner measured stands in a ledger
beside the run, written by the runner itself, so that "lost" is counted against what was really
measured and not against what the driver remembers. Processes are found by a mark in their
environment.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.configuration import Settings
from tuner.workload.records.probe import (
    Measurement,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    Runner,
    WindowPolicy,
)
from tuner.workload.records.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]
#: Variable that marks every process of a fault.
MARK = "JOULEFRONT_FAULT"
#: Windows of the faults: long enough for some steps, since nothing here is about precision.
QUICK = WindowPolicy(min_s=0.2, min_steps=2, max_s=0.3, settle_s=0.0, idle_s=0.0)


@dataclass(frozen=True)
class Outcome:
    """The state that one fault left.

    Attributes:
        said: the sentence that the user was told.
        lost: measurements made that are neither in the trace nor in the study at the end.
        told_twice: measurements that the trace or the study holds twice.
        clocks_wrong: GPUs whose clocks or limits are not what they were.
        processes_left: processes of the fault that still live, and its temporary folders.
        front_differs: 1 if the search that continued ended with another front than one that
            nothing disturbed.
        wrong: what else is not as it should be, a phrase each: the study did not go on, the
            sentence is missing, ...
        recovery_s: from a rank's death to the next probe's start; None where no rank died.
        skipped: why it could not be caused here; empty where it was.
    """

    said: str = ""
    lost: int = 0
    told_twice: int = 0
    clocks_wrong: int = 0
    processes_left: int = 0
    front_differs: int = 0
    wrong: tuple[str, ...] = ()
    recovery_s: float | None = None
    skipped: str = ""

    @property
    def survived(self) -> bool:
        counts = self.lost + self.told_twice + self.clocks_wrong + self.processes_left
        counts += self.front_differs
        return counts == 0 and bool(self.said) and not self.wrong and not self.skipped

    @property
    def failed(self) -> bool:
        return not self.survived and not self.skipped


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: as in the table.
        cause: makes it happen in an empty folder.
        fast: well under two seconds and without torch: tried in the everyday suite.
        often: tried by CI; else by `make long` and the benchmark only.
    """

    name: str
    cause: Callable[[Path], Outcome]
    fast: bool = True
    often: bool = True


class Unavailable(Exception):
    """This machine cannot have this fault, with the reason."""


#: Lines of a ledger that are no measurement: a session begins; what stands above is saved.
SESSION, SAVED = "# session", "# saved"


class LedgerRunner:
    """Writes down what a runner measured, where no driver can forget it.

    Args:
        runner: answers.
        ledger: a file of lines "probe_id live-key".
        before: called with each request first; may cause the fault.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: Path,
        before: Callable[[ProbeRequest], None] = lambda request: None,
    ) -> None:
        self._runner, self._ledger, self._before = runner, ledger, before
        self.meter = runner.meter
        self._write(SESSION)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        return self.run_interactive(request, lambda asked, measurements: ())

    def run_interactive(self, request: ProbeRequest, next_settings: NextSettings) -> ProbeRecord:
        """Every window is written down as soon as anybody could know of it."""
        self._before(request)
        written = 0

        def note(measurements: Sequence[Measurement]) -> None:
            nonlocal written
            new = measurements[written:]
            self._write(*(f"{request.probe_id} {measurement.live.key}" for measurement in new))
            written = len(measurements)

        def asked(longer: ProbeRequest, measurements: Sequence[Measurement]) -> Sequence[Settings]:
            note(measurements)
            return next_settings(longer, measurements)

        record = self._runner.run_interactive(request, asked)
        note(record.measurements)
        return record

    def noted(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return a function that saves what was measured, and writes down that it is saved."""

        def saved(*args: Any) -> None:
            save(*args)
            self._write(SAVED)

        return saved

    def _write(self, *lines: str) -> None:
        if lines:
            with self._ledger.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class Child:
    """The end of a forked child: its output, and its exit code (minus the signal)."""

    code: int
    said: str


#: Children of `fork` that nobody has waited for.
_forked: set[int] = set()


def fork(body: Callable[[], object], out: Path) -> int:
    """Run `body` in a forked child whose output goes to a file; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        _forked.add(pid)
        return pid
    code = 70
    try:
        # A job of its own: what kills or interrupts it must not reach the one who watches.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        result = body()
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def joined(pid: int, out: Path, *, limit_s: float = 120.0) -> Child:
    """Wait for a forked child, and kill it when it does not end."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _forked.discard(pid)
            text = out.read_text(errors="replace") if out.exists() else ""
            return Child(os.waitstatus_to_exitcode(status), text)
        time.sleep(0.01)
    _end(pid)
    return Child(-999, f"it did not end within {limit_s:g} s")


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _forked.discard(pid)


def in_child(body: Callable[[], object], folder: Path) -> Child:
    """Run `body` in a forked child to its end, however that comes."""
    out = folder / f"child-{uuid.uuid4().hex[:6]}.out"
    return joined(fork(body, out), out)


def in_interpreter(body: Callable[[], object], folder: Path, *, limit_s: float = 120.0) -> Child:
    """Run `body`, which can be pickled, in a new interpreter to its end, however that comes.

    What uses Ray cannot be forked: threads of a Ray that this process used before are missing in
    the child, which then waits for them.
    """
    out = folder / f"child-{uuid.uuid4().hex[:6]}.out"
    work = "import pickle, sys; sys.exit(pickle.load(sys.stdin.buffer)())"
    with out.open("wb") as said:
        child = subprocess.Popen(
            [sys.executable, "-c", work],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )
    try:
        child.communicate(pickle.dumps(body), timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return Child(-999, f"it did not end within {limit_s:g} s")
    return Child(child.returncode, out.read_text(errors="replace"))


def command(*words: str) -> Callable[[], int]:
    """Return the command `tuner` with its arguments, for a child."""

    def run() -> int:
        from tuner.cli.main import main

        return main(words)

    return run


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """Mark what is started inside, so that `wait_gone` finds it, by a mark around it, too."""
    before = os.environ.get(MARK)
    mark = f"{before or ''}/{uuid.uuid4().hex}"
    os.environ[MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before


def living(mark: str) -> list[int]:
    """Find processes started with the mark, or one inside it, in their environment, or forked.

    The children that `fork` makes are not among them: whoever made one waits for it.
    """
    word = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and word in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_gone(mark: str, keep: int | None = None, *, limit_s: float = 20.0) -> int:
    """Count the marked processes except `keep` that live after `limit_s`, and end them."""
    until = time.monotonic() + limit_s
    left: list[int] = []
    empty = 0  # a process that has just been started shows no environment yet: look twice
    while empty < 2 and time.monotonic() < until:
        left = [pid for pid in living(mark) if pid != keep]
        empty = 0 if left else empty + 1
        time.sleep(0.05)
    count = len(left)
    while left:  # again, for what one of them started before it was killed
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = [pid for pid in living(mark) if pid != keep]
    return count


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Make a folder, and end what was started meanwhile before the folder is removed.

    What a fault left when it was given up would otherwise go on to write there.
    """
    before = set(_forked)
    with tempfile.TemporaryDirectory(prefix="joulefront-fault-") as name, marked() as mark:
        try:
            yield Path(name)
        finally:
            for pid in _forked - before:
                _end(pid)
            wait_gone(mark, limit_s=0.5)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB where the runs go."""
    disk = folder / "runs"
    disk.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        raise Unavailable("no permission to mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def fill(disk: Path) -> Path:
    """Write a file until no byte is free; return its path."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def unsaved(ledger: Path) -> Counter[tuple[str, ...]]:
    """Count what a session had measured, and had not yet saved when the next one began.

    A driver that is killed at any moment may be killed between a measurement and the end of its
    saving, for which no driver can be blamed. Of each session that is one probe, its last; what was
    measured before is lost without having been saved.
    """
    found: Counter[tuple[str, ...]] = Counter()
    last: list[tuple[str, ...]] = []
    for line in ledger.read_text().splitlines():
        if line == SESSION:
            found.update(each for each in last if each[0] == last[-1][0])
        if line in (SESSION, SAVED):
            last = []
        else:
            last.append(tuple(line.split(" ", 1)))
    return found


def run_of(folder: Path) -> RunFolder:
    """Return the run that every fault makes in its folder."""
    return RunFolder(folder / "runs" / "study")


def count_losses(
    folder: Path, storage: str | None = None, *, any_moment: bool = False
) -> tuple[int, int, int]:
    """(lost, told twice, trials left running) of a fault's run that has ended.

    A measurement of the ledger is lost where the trace lacks it, and one of the trace where the
    study does. It is told twice where the trace holds its probe twice, or the study a second
    COMPLETE trial of it.

    Args:
        any_moment: the driver was killed at any moment, also while it saved (`unsaved`).
    """
    import optuna
    from optuna.trial import TrialState

    from tuner.study.recorder import open_storage

    run, ledger = run_of(folder), folder / "ledger"
    records = read_trace(run.trace).records
    kept = Counter(
        (record.request.probe_id, measurement.live.key)
        for record in records
        for measurement in record.measurements
    )
    lines = [line for line in ledger.read_text().splitlines() if line not in (SESSION, SAVED)]
    made = Counter(tuple(line.split(" ", 1)) for line in lines)
    if any_moment:
        made -= unsaved(ledger)
    opened = open_storage(storage, run.journal)
    study = optuna.load_study(study_name=run.name, storage=opened)
    trials = study.get_trials(deepcopy=False)
    told = Counter(
        (t.user_attrs["probe_id"], t.user_attrs["configuration"].partition(" | ")[2] or "default")
        for t in trials
        if t.state == TrialState.COMPLETE
    )
    asked = {
        (r.request.probe_id, c.key.partition(" | ")[2] or "default")
        for r in records
        for c in r.request.configurations()
        if c.live in {m.live for m in r.measurements}
    }
    names = Counter(record.request.probe_id for record in records)
    lost = sum((made - kept).values()) + len(asked - set(told))
    if lost:
        print(f"lost: {made - kept} were measured, and are not in the trace")
        print(f"lost: {asked - set(told)} are in the trace, and not in the study")
    twice = sum(n - 1 for n in names.values()) + sum(n - 1 for n in told.values())
    return lost, twice, sum(t.state == TrialState.RUNNING for t in trials)


def sentence(text: str) -> str:
    """Return the last line that a command printed, without its name; empty after a traceback."""
    if "Traceback" in text:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("tuner: ") if lines else ""


def phrases(*checks: tuple[bool, str]) -> tuple[str, ...]:
    """Return the phrase of every check that fails."""
    return tuple(phrase for good, phrase in checks if not good)


def outcome_of(
    folder: Path,
    *checks: tuple[bool, str],
    storage: str | None = None,
    any_moment: bool = False,
    **seen: Any,
) -> Outcome:
    """Return the outcome of a fault's run that has ended: its losses, and the checks that fail.

    Args:
        checks: as of `phrases`.
        storage, any_moment: as of `count_losses`.
        seen: what else was seen, by the names of `Outcome`.
    """
    lost, twice, running = count_losses(folder, storage, any_moment=any_moment)
    none_left = (running == 0, f"{running} trials were left running")
    return Outcome(lost=lost, told_twice=twice, wrong=phrases(*checks, none_left), **seen)
