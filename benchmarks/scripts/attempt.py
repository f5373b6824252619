"""One attempt as a new user: `tuner optimize -- COMMAND`, and the verdict on its answer."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.scripts.alone import Alone, end_group, start_alone
from benchmarks.scripts.programs import Program, environment_of, prepare
from tuner.api import load_result
from tuner.problem.run_folder import RunFolder
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord
from tuner.workload.records.trace import read_trace

#: Figures of a table have three digits.
_ROUNDED = 0.005
NOTHING = "nothing can be turned"
#: The line of today's training, behind its time.
_TODAY = re.compile(r"^(\d\d:\d\d:\d\d )?today: ", re.M)
#: Wait for the end of a program that cannot train here; one that updates by hand does not end.
ERROR_LIMIT_S = 30.0
#: Steps that are timed by hand of each start.
HAND_STEPS = 60
#: The line of the knobs that are searched.
_SEARCHED = re.compile(r"configurations? of (?P<knobs>\w+(?:, \w+)*);")
_RUN = re.compile(r"run (\S+)$", re.M)
PARTS = ("ranks", "micro_batch", "accumulation", "global_batch")


@dataclass(frozen=True)
class Options:
    """Where and for how long attempts run.

    Attributes:
        cache: the folder of environment, sources, inputs and runs.
        sources: folder with repositories; None for GitHub.
        probes, search_s: limits of a search.
        limit_s: wall time of an attempt.
        hand_s: time to step for each start that checks a recommendation; 0 for no check.
    """

    cache: Path
    sources: Path | None
    probes: int
    search_s: float
    limit_s: float
    hand_s: float


@dataclass
class Attempt:
    """Outcome of one attempt.

    Attributes:
        verdict: "answered", "nothing to turn", "too short", "error told", or what is wrong:
            "refused", "no answer", "out of time", "error not told", "misread", "unavailable".
        says: the headline, or the last line.
        own_first_step_s, own_death_s: of the command alone.
        today_s, first_point_s, ended_s: from the command to the line of today's training, to its
            first measured point, and to its end.
        first_window_s: length of the window of the first measured point.
        today: the values that were read of `PARTS`; None for unknown.
        wrong: those that differ from the truth.
        knobs: those that were searched.
        outside: times of the answer's table that lie outside of what the windows of the same
            configuration showed.
        failures: kind and message of each failed probe.
        recommended: what to train with, or what may be better than today's (`promises`).
        time: relative time of what is recommended, with the ends of its interval; empty if the
            answer is to keep today's.
        by_hand: the same ratio, timed by hand; None if it was not.
    """

    name: str
    origin: str
    verdict: str = ""
    says: str = ""
    own_first_step_s: float | None = None
    own_death_s: float | None = None
    today_s: float | None = None
    first_point_s: float | None = None
    ended_s: float | None = None
    first_window_s: float = 0.0
    today: dict[str, int | None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    knobs: list[str] = field(default_factory=list)
    outside: int = 0
    probes: int = 0
    failures: list[str] = field(default_factory=list)
    recommended: str = ""
    promises: bool = False
    time: list[float] = field(default_factory=list)
    by_hand: float | None = None

    @property
    def right(self) -> bool:
        """True if the first attempt gave what the program allows."""
        return self.verdict in ("answered", "nothing to turn", "too short", "error told")

    @property
    def holds(self) -> bool | None:
        """True if the time by hand lies in the interval; None if it was not timed."""
        if self.by_hand is None or not self.time:
            return None
        return self.time[1] <= self.by_hand <= self.time[2]

    @property
    def keeps_promise(self) -> bool | None:
        """True if what the answer only named as promising was faster by hand; None if unknown."""
        return self.by_hand < 0 if self.promises and self.by_hand is not None else None

    def line(self) -> str:
        """Return the row of a table."""
        first = " ".join(
            f"{label} {value:.1f} s"
            for label, value in (
                ("today", self.today_s),
                ("first point", self.first_point_s),
                ("its window", self.first_window_s or None),
                ("own step", self.own_first_step_s),
                ("own death", self.own_death_s),
                ("end", self.ended_s),
            )
            if value is not None
        )
        wrong = f" WRONG {self.wrong} of {self.today}" if self.wrong else ""
        timed = f" by hand {100 * self.by_hand:+.0f} % time" if self.by_hand is not None else ""
        return f"{self.name:34} {self.verdict:14}{wrong} {first};{timed} {self.says[:200]}"


def attempt(program: Program, options: Options, announce: Callable[[str], None]) -> Attempt:
    """Start a program alone, then under `tuner optimize`, and judge the answer.

    Raises:
        Unavailable: the program cannot be had here.
    """
    folder = prepare(program, options.cache, options.sources)
    environment = environment_of(program, folder, options.cache)
    words = program.words(options.cache)
    announce("alone")
    limit_s = min(options.limit_s, ERROR_LIMIT_S) if program.error else options.limit_s
    alone = start_alone(words, folder, environment, limit_s=limit_s, settle_s=1.0)
    found = Attempt(program.name, program.origin)
    found.own_first_step_s = alone.first_step_s
    if alone.first_step_s is None:
        found.own_death_s = alone.died_s
    folder = prepare(program, options.cache, options.sources)  # nothing is left of that start
    announce("tuner optimize")
    runs = options.cache / "runs"
    shutil.rmtree(runs / program.slug, ignore_errors=True)
    code, log = _optimize(program, folder, runs, options, found)
    judge(found, program, alone, code, log)
    if found.recommended and options.hand_s:
        announce(f"timing {found.recommended} by hand")
        found.by_hand = time_by_hand(program, folder, runs, options, found.recommended)
    return found


def _optimize(
    program: Program, folder: Path, runs: Path, options: Options, found: Attempt
) -> tuple[int | None, str]:
    """Run the search; return its exit status, None if it was ended, and its output."""
    limits = ["--max-probes", str(options.probes), "--search-time", f"{options.search_s:g}s"]
    python = options.cache / "environment" / "bin" / "python"
    command = [str(python), "-m", "tuner.cli", "optimize", *limits, "--plain"]
    command += ["--name", program.slug, "--runs-dir", str(runs), "--"]
    log = runs / f"{program.slug}.log"
    runs.mkdir(parents=True, exist_ok=True)
    trace = RunFolder(runs / program.slug).trace
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, *program.words(options.cache)],
            cwd=folder,
            env=environment_of(program, folder, options.cache),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    code = None
    try:
        while child.poll() is None and time.monotonic() - began < options.limit_s:
            if found.today_s is None and _TODAY.search(log.read_text(errors="replace")):
                found.today_s = time.monotonic() - began
            if found.first_point_s is None and trace.is_file() and _has_point(trace):
                found.first_point_s = time.monotonic() - began
            time.sleep(0.05)
        code = child.poll()
        found.ended_s = time.monotonic() - began
    finally:
        end_group(child)
    return code, log.read_text(errors="replace")


def _has_point(trace: Path) -> bool:
    return b'"step_time_s"' in trace.read_bytes()


def judge(found: Attempt, program: Program, alone: Alone, code: int | None, log: str) -> None:
    """Fill in the verdict, by what was read by hand of the program."""
    lines = [line for line in log.strip().splitlines() if line.strip()]
    found.says = lines[-1] if lines else ""
    searched = _SEARCHED.search(log)
    found.knobs = searched["knobs"].split(", ") if searched else []
    if program.today and alone.first_step_s is None:
        found.verdict, found.says = "unavailable", f"alone: {alone.last_words[-300:]}"
    elif code is None:
        found.verdict = "out of time"
    elif code in (0, 1) and program.today and (run := _RUN.search(log)):  # 1: measured nothing
        _read_result(found, program, load_result(run[1]))
    elif program.error:
        told = code == 2 and re.search(program.error, log)
        found.verdict = "error told" if told else "error not told"
    elif NOTHING in log and not program.turns:
        found.verdict = "nothing to turn"
        found.says = next(line for line in lines if NOTHING in line)
    else:
        found.verdict = "refused" if code == 2 else "no answer"


def _read_result(found: Attempt, program: Program, result: Result) -> None:
    """Fill in what a search that ended says of today, and what it recommends."""
    if result.today_facts is not None:
        read = result.today_facts.to_json()
        found.today = {part: read[part] for part in PARTS}
        found.wrong = misread(found.today, program.today)
    assert result.run_dir is not None
    records = read_trace(RunFolder(result.run_dir).trace).records
    found.probes = len(records)
    windows = [window.window_s for record in records for window in record.measurements]
    found.first_window_s = windows[0] if windows else 0.0
    found.outside = outside_windows(result, records)
    failures = [r.failure for r in records if r.failure is not None]
    found.failures = [f"{f.kind}: {f.message}" for f in failures if not f.type.too_short]
    advice = result.recommendation
    if advice is None:
        over = bool(failures) and not found.failures
        found.verdict = "too short" if over and program.short else "no answer"
        found.says = failures[0].message if failures else result.stopped
        return
    found.verdict = "misread" if found.wrong else "answered"
    found.says = result.headline
    if advice.action == "train" and advice.time is not None:
        found.recommended = advice.point.configuration.short
        found.time = [advice.time.relative, advice.time.low, advice.time.high]
    elif advice.promising is not None:
        found.recommended, found.promises = advice.promising.configuration.short, True


def misread(today: Mapping[str, int | None], truth: Sequence[int]) -> list[str]:
    """Return the `PARTS` that are known and differ from the truth, as far as that was read."""
    known = zip(PARTS, truth, strict=False)
    return [part for part, value in known if today[part] not in (None, value)]


def outside_windows(result: Result, records: Sequence[ProbeRecord]) -> int:
    """Return how many measured points have a time of a step that none of their windows spans."""
    seen: dict[Configuration, list[float]] = {}
    for record in records:
        for window in record.measurements:
            shown = Configuration(record.request.launch, window.live)
            seen.setdefault(shown, []).append(window.step_time_s)
    times = {p.configuration: p.time_to_solution_s / result.steps for p in result.points}
    return sum(
        not min(seen[each]) * (1 - _ROUNDED) <= time_s <= max(seen[each]) * (1 + _ROUNDED)
        for each, time_s in times.items()
        if each in seen
    )


def time_by_hand(
    program: Program, folder: Path, runs: Path, options: Options, point: str
) -> float | None:
    """Return relative time per step of a point's launch.sh over the user's start, in turn twice."""
    python = options.cache / "environment" / "bin" / "python"
    environment = environment_of(program, folder, options.cache)
    out = runs / program.slug / "by-hand"
    written = ["--runs-dir", runs, "--point", point, "--out", out]
    subprocess.run(
        [python, "-m", "tuner.cli", "apply", program.slug, *written],
        check=True,
        env=environment,
        capture_output=True,
        cwd=folder,
    )
    today = program.words(options.cache)
    changed = ["bash", str(out / "launch.sh")]
    times: tuple[list[float], list[float]] = ([], [])
    for words, kept in ((today, times[0]), (changed, times[1])) * 2:
        seen = _steps_within(words, folder, environment, options.hand_s)
        if seen.step_s is None:
            return None
        kept.append(seen.step_s)
    return statistics.fmean(times[1]) / statistics.fmean(times[0]) - 1


def _steps_within(
    words: Sequence[str], folder: Path, environment: dict[str, str], hand_s: float
) -> Alone:
    return start_alone(words, folder, environment, steps=HAND_STEPS, limit_s=hand_s)
