"""Whether every place names the same choice, and whether what was measured well gets into it.

Answers of recorded runs (tests/golden/recorded) are compared, and whole studies of ten launches of
which five save, with launches that differ by 1 %, end under limits, after interrupts, and where the
baseline or the node fails when it is launched again.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from benchmarks.noisy_cluster import Noise, NoisyRunner, Truth
from benchmarks.words import printed, shown_answers
from tests.golden import NAMES, OUTPUTS, prepared
from tuner.api import load_result
from tuner.cli.main import main as tuner_command
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.study.events import Progress
from tuner.study.request import StudyRequest
from tuner.study.session import Session
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest

#: What the made-up launches save, a share, and which of them do.
SAVING, GOOD = 0.73, range(2, 7)


def named(run: str, runs: Path) -> tuple[set[str], set[str]]:
    """Return the names that the places give to what to run, and to the best that was measured."""
    result = load_result(run, runs_dir=runs)
    assert result.recommended is not None
    front = _json(runs, "show", run)
    advised = {
        result.recommended.configuration.short,
        _short(front["recommendation"]["point"]),
    }
    best = {_short(front["best"]["configuration"])}
    best.add(_short(_json(runs, "explain", run)["point"]["configuration"]))
    page = runs / "report.html"
    _printed(runs, "show", "--html", run, "--out", str(page))
    head = re.search("<h1.*?</h1>", page.read_text("utf-8"))
    assert head is not None
    assert result.recommendation is not None
    keeps = "Keep what you run today" in head[0]
    if keeps != (result.recommendation.action == "keep"):
        advised.add("the report's headline")
    advised.add(_short(_json(runs, "choose", run)["point"]["configuration"]))
    with tempfile.TemporaryDirectory() as out:
        if applied := _json(runs, "apply", run, "--out", out):
            advised.add(_short(applied["point"]["configuration"]))
    if compared := _json(runs, "compare", run):  # refused where the best is what runs today
        best.add(compared["b"])
    return advised, best


def _printed(runs: Path, *words: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        tuner_command([*words, "--runs-dir", str(runs)])
    return output.getvalue()


def _json(runs: Path, *words: str) -> Any:
    text = _printed(runs, *words, "--json")
    return json.loads(text) if text else None


def _short(configuration: dict[str, Any]) -> str:
    return Configuration.from_json(configuration).short


@dataclass(frozen=True)
class Case:
    """One way in which a study ends.

    Attributes:
        name: of the case.
        settings: limits of the study.
        interrupted: number of the probe at whose start it is interrupted; None if it is not.
        fails: what fails when the baseline is launched again: "" or a kind of failure.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    interrupted: int | None = None
    fails: str = ""


CASES = (
    *(Case(f"{probes} probes", {"max_probes": probes}) for probes in (24, 11, 8, 5)),
    *(Case(f"{seconds} s", {"search_s": seconds}) for seconds in (600.0, 300.0, 150.0)),
    *(Case(f"{budget_kJ} kJ", {"probe_budget_kJ": budget_kJ}) for budget_kJ in (60.0, 30.0)),
    *(Case(f"interrupted at probe {n}", {"max_probes": 24}, n) for n in (4, 8, 14)),
    Case("no verification", {"max_probes": 12, "verify": False}),
    Case("the baseline runs out of memory again", {"max_probes": 24}, fails="out_of_memory"),
    Case("the node fails again", {"max_probes": 24}, fails="node"),
)


class _Failing(NoisyRunner):
    """A runner on which the launches of the baseline fail from the second on."""

    def __init__(self, truth: Truth, noise: Noise, *, seed: int, fails: str) -> None:
        super().__init__(truth, noise, seed=seed)
        self._today, self._fails = truth.baseline.launch, fails

    def run(self, request: ProbeRequest) -> ProbeRecord:
        record = super().run(request)
        if not self._fails or request.purpose != "verify" or request.launch != self._today:
            return record
        return replace(record, measurements=(), failure=Failure(self._fails, "made up"))


def _truth() -> Truth:
    launches = [Configuration(Settings(micro_batch=number + 1)) for number in range(10)]
    times_s = [0.25 * (1 - SAVING if number in GOOD else 1 + 0.02 * number) for number in range(10)]
    return Truth("made-up", {c: (s, 300.0) for c, s in zip(launches, times_s, strict=True)})


def lost(case: Case, seed: int) -> bool | None:
    """Return whether a study's answer lost the saving; None if the search did not measure it."""
    truth = _truth()
    executor = SimulatedExecutor(_Failing(truth, Noise(0.01), seed=seed, fails=case.fails))
    started = 0

    def count(event: Progress) -> None:
        nonlocal started
        started += event.kind == "started"
        if case.interrupted is not None and started > case.interrupted:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            truth.problem(),
            lambda announce: executor,
            StudyRequest(search=SearchSettings(seed=seed, **case.settings)),
            run=RunFolder.named(folder, "study"),
            notify=count,
        )
        with contextlib.suppress(KeyboardInterrupt):
            session.run()
        result = load_result("study", runs_dir=folder)
    saves = {point.configuration.get("micro_batch") for point in result.points}
    if not saves & {number + 1 for number in GOOD}:
        return None
    assert result.recommendation is not None
    advised = result.recommendation.point.configuration.get("micro_batch")
    return result.recommendation.action != "train" or advised not in {n + 1 for n in GOOD}


#: Least saving, a share in per cent, and least probability of what an answer names.
LEAST_PERCENT, LEAST_SURE_PERCENT = 1.0, 60
#: Days in ten years, and the factor from which on a limit is out of reach.
TEN_YEARS, FAR = 3652, 100


def _numbers(pattern: str, line: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, line)]


def laughable(line: str) -> str:
    """Return what is laughable about a line of an answer; "" if nothing is."""
    if re.search(r"(?<![\d.])[-+]0(\.0+)? %", line):
        return "a change of zero with a sign"
    if any(days > TEN_YEARS for days in _numbers(r"([\d,.]*\d) days", line)):
        return "more than ten years"
    if any(times > FAR for times in _numbers(r"([\d,.]*\d) times the", line)):
        return "a limit that is out of reach"
    if not re.search("Train with|Keep what you run today for now", line):
        return ""
    saved = _numbers(r"([\d.]+) % (?:less )?(?:energy|time)", line)
    if saved and max(saved) < LEAST_PERCENT and "; it trains" not in line:
        return "a saving of under 1 %"
    odds = _numbers(r"\((?:probability )?(\d+) %(?: sure)?\)", line)
    if odds and max(odds) < LEAST_SURE_PERCENT and "would tell" not in line:
        return "even odds"
    return ""


def laughed_at() -> int:
    """Return the number of laughable lines in recorded and golden answers, and print them."""
    count = 0
    for number, (name, text) in enumerate(_answers(), 1):
        print(f"{number}: {name}", file=sys.stderr, flush=True)
        for line in text.splitlines():
            if why := laughable(line):
                count += 1
                print(f"{name}: {why}: {line}", flush=True)
    return count


def _answers() -> Iterator[tuple[str, str]]:
    # Each is shown as it is made: those of the recorded runs take a second or more each.
    for path in sorted(OUTPUTS.glob("*.txt")):
        yield path.name, printed(path.read_text(encoding="utf-8"))
    yield from shown_answers()


def one_choice() -> float:
    """Return the share of recorded runs of which every place names one choice."""
    agreed = 0
    with tempfile.TemporaryDirectory() as work:
        prepared(Path(work))
        for run in NAMES:
            advised, best = named(run, Path(work) / "runs")
            agreed += len(advised) == len(best) == 1
            choices = f"run {' or '.join(sorted(advised))}; best {' or '.join(sorted(best))}"
            print(f"{run}: {choices}", flush=True)
    return agreed / len(NAMES)


def answers_lost(seeds: int) -> float:
    """Return the number of studies, `seeds` of each case, whose answer lost what was measured."""
    every = 0
    for case in CASES:
        found = [lost(case, seed) for seed in range(seeds)]
        told = [answer for answer in found if answer is not None]
        every += sum(told)
        print(f"{case.name}: {sum(told)} of {len(told)} answers lost", flush=True)
    return every


#: How each figure is measured with a number of seeds, the quickest first, and its unit.
FIGURES: Mapping[str, tuple[Callable[[int], float], str]] = {
    "laughable": (lambda seeds: laughed_at(), "count"),
    "one_choice_everywhere": (lambda seeds: one_choice(), "ratio"),
    "answers_lost": (answers_lost, "count"),
}


def main() -> None:
    parser = arguments(__doc__, "answers")
    parser.add_argument("--seeds", type=int, default=6, help="studies of each case")
    parser.add_argument("--quick", action="store_true", help="one study of each case")
    parser.add_argument(
        "--only", choices=FIGURES, action="append", help="this figure alone; may be repeated"
    )
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    figures = []
    for name, (measure, unit) in FIGURES.items():
        if name in (options.only or FIGURES):
            figures.append(Figure(name, measure(seeds), unit))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
