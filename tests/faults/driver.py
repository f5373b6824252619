"""Faults of the driver and of the disk under it: killed anywhere, interrupted, full, read-only.

The study is a real one, through `tuner.optimize`, its run folder and its journal; only the training
is replaced, by the analytic model, which answers at once. The driver runs in a forked child that is
killed at one point of its cycle by a wrapper around that point, and is then asked the same again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import tuner
from tests.faults.harness import (
    Child,
    Fault,
    LedgerRunner,
    Outcome,
    fill,
    fork,
    in_child,
    joined,
    outcome_of,
    run_of,
    sentence,
    small_disk,
)
from tests.support.studies import LONG_JOB, FormulaRunner
from tests.waiting import wait_until
from tuner.cli.main import SAME_REQUEST_S
from tuner.executors import local
from tuner.executors.base import Executor
from tuner.executors.local import InlineExecutor
from tuner.problem.run_folder import RunFolder
from tuner.result import Result
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.records.trace import read_trace

#: Probes of a study; the fault strikes at the third.
PROBES, AT = 5, 2
#: Exit code of a driver that was killed.
KILLED = -signal.SIGKILL


def _nothing(request: ProbeRequest) -> None:
    """Causes no fault."""


def search(
    folder: Path,
    *,
    before: Callable[[ProbeRequest], None] = _nothing,
    storage: str | None = None,
    runs_dir: Path | None = None,
    probes: int = PROBES,
    cluster: str = "cpu-2",
    space: str = "default",
    job: str | None = None,
    model: type[FormulaRunner] = FormulaRunner,
    executor: Callable[[], Executor] | None = None,
) -> Result:
    """Search in one session of the study.

    Without a job its training is so long that every probe repays itself. The model answers in the
    ranks' place, in this process unless an executor is made.
    """
    runs_dir, here = runs_dir or folder / "runs", contextlib.ExitStack()

    def inline() -> Executor:
        runner = LedgerRunner(model(), folder / "ledger", before)
        noted = runner.noted(local.save_partial)
        here.enter_context(mock.patch.object(local, "save_partial", noted))
        return InlineExecutor(runner, keep_in=runs_dir / "study")

    with here:
        return tuner.optimize(
            job or LONG_JOB,
            cluster=cluster,
            space=space,
            executor=(executor or inline)(),
            runs_dir=runs_dir,
            name="study",
            storage=storage,
            search=tuner.SearchSettings(max_probes=probes),
            report=False,
            progress=False,
            on_progress=lambda event: print(event.message) if event.kind == "note" else None,
        )


def optimize(folder: Path, **options: Any) -> int:
    """One session of the study, as the command runs it; its exit code.

    Notes and the front go to stdout.
    """
    from tuner.search_spaces.errors import InputError
    from tuner.study.session import Interrupted

    try:
        result = search(folder, **options)
    except InputError as error:
        print(f"tuner: {error}")
        return 2
    except Interrupted:
        print("tuner: interrupted")
        return 130
    except OSError as error:  # as `tuner.cli.main` does with those of a file
        if error.filename is None:
            raise
        print(f"tuner: cannot use {error.filename}: {error.strerror}")
        return 2
    points = [
        (point.configuration.key, point.energy_to_solution_kJ, point.time_to_solution_s)
        for point in result.front_points
    ]
    print("front " + json.dumps(points))
    print(f"done {result.spent.probes}", flush=True)
    return 0


def verdict(
    folder: Path,
    child: Child,
    resumed: Child,
    *,
    expected: int | None,
    said: str = "",
    storage: str | None = None,
    probes: int | None = PROBES,
) -> Outcome:
    """Judge a study that was broken off and asked again.

    Args:
        folder: where it is.
        child: the driver that the fault struck.
        resumed: the one after it.
        expected: the exit code that the first should have; None where any will do.
        said: what the user was told; by default the first's last sentence, or what the one after
            it says of the state that a dead one left.
        storage: where the study is, if not in its journal.
        probes: how many it should have in the end; None where the search decides that.
    """
    good = expected is None or child.code == expected
    done = "done " if probes is None else f"done {probes}\n"
    return outcome_of(
        folder,
        (good, f"it ended with {child.code}: {child.said[-300:]}"),
        ("Traceback" not in child.said + resumed.said, "a traceback was shown"),
        ("s3cret" not in child.said + resumed.said, "the storage's password was shown"),
        (resumed.code == 0 and done in resumed.said, f"not resumed: {resumed}"),
        said=said or (mended(resumed) if child.code < 0 else sentence(child.said)),
        storage=storage,
    )


def continued(
    folder: Path,
    first: Callable[[], int],
    *,
    again: Callable[[], int] | None = None,
    mend: Callable[[], object] = lambda: None,
    **judged: Any,
) -> Outcome:
    """Run the session that the fault strikes, mend it, ask the same again, and judge.

    Args:
        again: the session after it; by default one of the plain study.
        judged: of `verdict`.
    """
    child = in_child(first, folder)
    mend()
    resumed = in_child(again or partial(optimize, folder), folder)
    return verdict(folder, child, resumed, **judged)


def third(strike: Callable[[], object]) -> Callable[[ProbeRequest], None]:
    """Return what strikes as the study's third probe is asked for."""

    def before(request: ProbeRequest) -> None:
        if request.probe_id == f"p{AT:04d}":
            strike()

    return before


# ---- killed


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_line(fd: int, data: Any) -> int:
    """Half of what was to be written reaches the file, and no more."""
    real_write(fd, bytes(data)[: len(data) // 2])
    os.fsync(fd)
    _kill()
    return 0


real_write = os.write


def killed_at(owner: type, name: str, when: str, at: int = AT, of: int = 0) -> Callable[[], None]:
    """Make the process die before, inside or after call number `at` with `of` arguments or more."""

    def arm() -> None:
        plain, calls = getattr(owner, name), [0]

        def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[0] += len(args) >= of
            if calls[0] != at + 1:
                return plain(self, *args, **kwargs)
            if when == "before":
                _kill()
            if when == "half":
                import tuner.workload.records.trace

                tuner.workload.records.trace.os = _OsThat(write=_half_line)  # type: ignore[attr-defined]
            result = plain(self, *args, **kwargs)
            _kill()
            return result

        setattr(owner, name, dying)

    return arm


class _OsThat:
    """The os module with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _killed(arm: Callable[[], Callable[[], None]], folder: Path) -> Outcome:
    def first() -> int:
        arm()()
        return optimize(folder)

    return continued(folder, first, expected=KILLED)


def mended(resumed: Child) -> str:
    """Return what a driver printed about the state an earlier one had left."""
    words = ("interrupted", "trace", "torn", "probes are in")
    lines = [line for line in resumed.said.splitlines() if any(word in line for word in words)]
    return "; ".join(lines[-2:])


def _book() -> type:
    from tuner.study.recorder import StudyRecorder

    return StudyRecorder


def _loop() -> type:
    from tuner.study.loop import SearchLoop

    return SearchLoop


def _writer() -> type:
    from tuner.workload.records.trace import TraceWriter

    return TraceWriter


def _lock() -> type:
    from optuna.storages.journal import JournalFileSymlinkLock

    return JournalFileSymlinkLock


#: (where in the cycle, the class, its method, when): points at which the driver is killed.
POINTS: tuple[tuple[str, Callable[[], type], str, str], ...] = (
    ("before a probe starts", _loop, "_start", "before"),
    ("after a probe started", _loop, "_start", "after"),
    ("before the trace line", _writer, "append", "before"),
    ("in the middle of the trace line", _writer, "append", "half"),
    ("after the trace line", _writer, "append", "after"),
    ("inside the journal, holding its lock", _lock, "release", "before"),
    ("before its trials are added", _book, "add", "before"),
    ("while its trials are added", _book, "_trial", "before"),
    ("after its trials are added", _book, "add", "after"),
    ("while study.toml is replaced", lambda: RunFolder, "write_study", "before"),
)


def _at_point(owner: Callable[[], type], name: str, when: str, folder: Path) -> Outcome:
    # study.toml is written at the start and at the end only, the journal also to make the study.
    at = {"write_study": 1, "release": 4}.get(name, AT)
    return _killed(lambda: killed_at(owner(), name, when, at=at), folder)


def _killed_while_probing(folder: Path) -> Outcome:
    return continued(folder, partial(optimize, folder, before=third(_kill)), expected=KILLED)


def _killed_again_and_again(folder: Path) -> Outcome:
    """Each session dies after one more probe, until one is left to finish."""

    def first() -> int:
        killed_at(_writer(), "append", "after", at=0)()
        return optimize(folder)

    for _ in range(PROBES - 1):
        in_child(first, folder)
    return continued(folder, first, expected=KILLED)


# ---- interrupted


def _interrupted(
    folder: Path,
    *,
    times: int,
    number: signal.Signals = signal.SIGINT,
    apart_s: float = 0.05,
    same_s: float = SAME_REQUEST_S,
) -> Outcome:
    """Ctrl-C while a probe runs; again while the first is still being cleaned up after.

    The same request, within `same_s` of the first, lets the clean-up end.
    """
    at_once = apart_s > same_s

    def strike() -> None:
        (folder / "probing").touch()
        time.sleep(120)

    def first() -> int:
        import tuner.cli.optimize
        from tuner.cli import main as command_line

        if times > 1:  # a clean-up that takes long
            plain = InlineExecutor.close

            def slow(self: InlineExecutor) -> None:
                (folder / "closing").touch()
                time.sleep(120 if at_once else 1)
                plain(self)
                (folder / "closed").touch()

            InlineExecutor.close = slow  # type: ignore[method-assign]

        def command(args: object) -> int:
            search(folder, before=third(strike))
            return 0

        tuner.cli.optimize._optimize = command
        command_line.SAME_REQUEST_S = same_s
        return command_line.main(["optimize"])

    out = folder / "first.out"
    pid = fork(first, out)
    for name in ("probing", "closing")[:times]:
        wait_until((folder / name).exists, said=out)
        time.sleep(apart_s)
        os.kill(pid, number)
    child = joined(pid, out, limit_s=60)
    if times > 1 and (folder / "closed").exists() == at_once:
        return Outcome(wrong=(f"a second signal after {apart_s} s: closed {not at_once}",))
    resumed = in_child(partial(optimize, folder), folder)
    return verdict(folder, child, resumed, expected=130)


# ---- the disk


def _full_disk(folder: Path) -> Outcome:
    with small_disk(folder) as disk:
        strike = third(partial(fill, disk))
        child = in_child(partial(optimize, folder, before=strike), folder)
        still = in_child(partial(optimize, folder), folder)  # there is no room yet
        (disk / "filler").unlink()
        resumed = in_child(partial(optimize, folder), folder)
        outcome = verdict(folder, child, resumed, expected=2)
        if still.code != 2 or not sentence(still.said):
            return Outcome(wrong=(f"asked again on the full disk: {still}",))
        return outcome


def _file_limit(folder: Path) -> Outcome:
    """Limit the size of files, as a quota does: the trace cannot grow by one more byte."""
    import resource

    def strike() -> None:
        # The kept record is a small file and fits; the trace and the journal are over it.
        size = run_of(folder).trace.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def first() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return optimize(folder, before=third(strike))

    return continued(folder, first, expected=2)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _read_only(folder: Path) -> Outcome:
    with small_disk(folder) as disk:
        _mount("-o", "remount,ro", str(disk))
        mend = partial(_mount, "-o", "remount,rw", str(disk))
        return continued(folder, partial(optimize, folder), mend=mend, expected=2)


def _turns_read_only(folder: Path) -> Outcome:
    """A file system with a file open for writing cannot be remounted; over the folder can."""
    with small_disk(folder) as disk:

        def strike() -> None:
            _mount("--bind", str(disk), str(disk))
            _mount("-o", "remount,bind,ro", str(disk))

        def mend() -> None:
            subprocess.run(["umount", str(disk)], check=True)

        first = partial(optimize, folder, before=third(strike))
        return continued(folder, first, mend=mend, expected=None)


def _gone_folder(folder: Path) -> Outcome:
    """Somebody deletes the probes' files while the study runs; the trace stays open."""
    import shutil

    def strike(request: ProbeRequest) -> None:
        shutil.rmtree(run_of(folder).path / "probes", ignore_errors=True)

    first = partial(optimize, folder, before=strike)
    return continued(folder, first, expected=0, said="nothing: none of it was needed")


# ---- who else is there, and what time it is


def _second_driver(folder: Path) -> Outcome:
    """Start a second driver while the first has a probe in flight."""

    def strike() -> None:
        second = in_child(partial(optimize, folder), folder)
        (folder / "second").write_text(f"{second.code} {sentence(second.said)}")

    outcome = continued(folder, partial(optimize, folder, before=third(strike)), expected=0)
    code, _, said = (folder / "second").read_text().partition(" ")
    if code != "2" or "being run by process" not in said:
        return Outcome(wrong=(f"the second driver was not refused: {code} {said}",))
    return replace(outcome, said=said)


def _torn_files(folder: Path) -> Outcome:
    """Cut the power: both files end in the middle of a line."""
    whole: list[object] = []

    def cut() -> None:
        run = run_of(folder)
        whole.extend(read_trace(run.trace).records)
        for path in (run.trace, run.journal):
            with path.open("ab") as file:
                file.write(b'{"schema_version": 1, "request": {"probe_id": "p00')

    first = partial(optimize, folder, before=third(_kill))
    outcome = continued(folder, first, mend=cut, expected=KILLED)
    if len(whole) != AT:
        return Outcome(wrong=(f"{len(whole)} records stood before the cut",))
    return outcome


def _time_jumps(folder: Path) -> Outcome:
    """Let the system's clock jump a day to and fro at every look; the monotonic one does not."""

    def first() -> int:
        real, looks = time.time, [0]

        def jumping() -> float:
            looks[0] += 1
            return real() + 86400.0 * (1 if looks[0] % 2 else -1)

        time.time = jumping  # type: ignore[assignment]
        began = time.monotonic()
        code = optimize(folder)
        if time.monotonic() - began > 60:
            print("it waited for a clock")
            return 3
        return code

    took_s: list[float] = []

    def look() -> None:
        ended = (run_of(folder).read_study() or {}).get("ended", {})
        took_s.append(ended.get("time_s", -1.0))

    said = "nothing: no clock but CLOCK_MONOTONIC is used"
    outcome = continued(folder, first, mend=look, expected=0, said=said)
    if not 0 <= took_s[0] < 60:
        return Outcome(wrong=(f"the search says that it took {took_s[0]} s",))
    return outcome


FAULTS: tuple[Fault, ...] = (
    *(
        Fault(f"driver killed {where}", partial(_at_point, owner, name, when))
        for where, owner, name, when in POINTS
    ),
    Fault("driver killed while a probe runs", _killed_while_probing),
    Fault("driver killed after every probe", _killed_again_and_again),
    Fault("Ctrl-C once", partial(_interrupted, times=1)),
    Fault("Ctrl-C twice", partial(_interrupted, times=2, same_s=0.5, apart_s=0.8)),
    Fault("SIGTERM", partial(_interrupted, times=1, number=signal.SIGTERM)),
    Fault("SIGTERM twice at once", partial(_interrupted, times=2, number=signal.SIGTERM)),
    Fault("full disk", _full_disk),
    Fault("file-size limit", _file_limit),
    Fault("read-only run folder", _read_only),
    Fault("run folder turns read-only", _turns_read_only),
    Fault("probe files deleted", _gone_folder),
    Fault("power cut: torn trace and journal", _torn_files),
    Fault("second driver on the same study", _second_driver),
    Fault("system time jumps", _time_jumps),
)
