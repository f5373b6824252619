"""Searches over training scripts of other projects: which end with an answer, what it saves.

Each script of `scripts.toml` runs unmodified, on tiny models and data made on the spot, in an
environment of its own; `tuner optimize` gets the command that its project documents, as a user
would paste it, and 12 probes. Sources are downloaded at run time: packages from the registry,
repositories at pinned commits from GitHub or from `--sources`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.scripts.environment import Unavailable, cache_folder, checkout, make_environment
from benchmarks.scripts.search import Asked
from tuner.api import load_result
from tuner.problem.run_folder import RunFolder
from tuner.results.result import Result
from tuner.search_spaces.space import load_space
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.trace import read_trace

LIST = Path(__file__).with_name("scripts.toml")
PROBES = 12


@dataclass(frozen=True)
class Listed:
    """A script of the list.

    Attributes:
        name: for tables.
        command: as its project documents it, with $INPUTS and $SITE.
        source: package and version; "" for a repository.
        repository, commit, folder: OWNER/NAME, the pinned commit, and the folder of the script.
        links: names in that folder, and the inputs that they lead to.
        knobs: packs or declarations of knobs, as for `--knobs`.
        global_batch: samples of a step where the command does not show them.
        path: folder for PYTHONPATH, from the script's.
        whole: True if the script imports other parts of its repository.
        today: micro-batch, accumulation and global batch that the command trains with, by reading
            the script; empty where nobody read it.
    """

    name: str
    command: str
    source: str = ""
    repository: str = ""
    commit: str = ""
    folder: str = "."
    links: Mapping[str, str] = field(default_factory=dict)
    knobs: Sequence[str] = ()
    global_batch: int = 0
    path: str = ""
    whole: bool = False
    today: Sequence[int] = ()

    def command_on(self, cache: Path) -> str:
        """Return the command with the inputs of a cache folder."""
        return self.command.replace("$INPUTS", str(cache / "inputs"))

    @property
    def part(self) -> str:
        """The folder of the repository that is needed."""
        return "." if self.whole else self.folder

    @property
    def slug(self) -> str:
        """The name as one word."""
        return self.name.lower().replace(" ", "-")

    @property
    def origin(self) -> str:
        """Source and version, for tables."""
        return self.source or f"{self.repository}@{self.commit[:7]}"


@dataclass(frozen=True)
class Options:
    """How the searches run.

    Attributes:
        cache: the folder of environment, sources and inputs.
        sources: folder of git repositories OWNER/NAME; None for GitHub.
        probes: of each search.
        limit_s: wall time of each search.
    """

    cache: Path
    sources: Path | None
    probes: int
    limit_s: float


@dataclass
class Outcome:
    """Outcome of one search.

    Attributes:
        script: the listed script.
        why: the reason if there is no answer.
        knobs: knobs in play.
        probes: number of probes, the failed ones included.
        failed: number of failed probes.
        launch_s: median time of a launch, from the request to the first step after warm-up.
        launch_J: median energy of a probe outside of its windows.
        energy, time: share saved over the script's own configuration; 0 if that is kept.
        answer: the recommended configuration.
        search_s: wall time of inspection and search.
        today: what the look took for micro-batch, accumulation and global batch; 0 is unknown.
    """

    script: Listed
    why: str = ""
    knobs: tuple[str, ...] = ()
    probes: int = 0
    failed: int = 0
    launch_s: float = 0.0
    launch_J: float = 0.0
    energy: float = 0.0
    time: float = 0.0
    answer: str = ""
    search_s: float = 0.0
    today: tuple[int, ...] = ()

    @property
    def tuned(self) -> bool:
        """True if the search ended with an answer."""
        return bool(self.answer)

    def line(self) -> str:
        """Return the row of the table."""
        first = f"{self.script.name:40} {self.script.origin:42}"
        if not self.tuned:
            return f"{first} no answer: {self.why}"
        return (
            f"{first} {len(self.knobs)} knobs, {self.probes} probes ({self.failed} failed), "
            f"launch {self.launch_s:.1f} s {self.launch_J:.0f} J, "
            f"saves {self.energy:.0%} energy {self.time:.0%} time, "
            f"{self.search_s:.0f} s: {self.answer}"
        )


def listed() -> tuple[list[str], list[str], list[Listed]]:
    """Return the packages, those without dependencies, and the scripts of the list."""
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    scripts = [
        Listed(**{**row, "command": " ".join(row["command"].split())}) for row in table["script"]
    ]
    return table["packages"], table["without_dependencies"], scripts


def prepare(script: Listed, cache: Path, sources: Path | None) -> Path:
    """Return the folder that a script starts in, fresh, with links to its inputs.

    Raises:
        Unavailable: its repository is not there.
    """
    work = cache / "work" / script.slug
    shutil.rmtree(work, ignore_errors=True)
    if script.repository:
        tree = checkout(script.repository, script.commit, script.part, cache / "sources", sources)
        shutil.copytree(tree / script.part, work / script.part)
    else:
        work.mkdir(parents=True)
    folder = work / script.folder
    for name, target in script.links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(cache / "inputs" / target)
    return folder


def search(script: Listed, folder: Path, python: Path, options: Options) -> Outcome:
    """Search over one script by `tuner optimize` in its environment, and read the answer."""
    runs = options.cache / "runs"
    shutil.rmtree(runs / script.slug, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{script.slug}.log"
    begin = time.monotonic()
    with log.open("w") as said:
        child = subprocess.Popen(
            [str(python), *_arguments(script, runs, options)],
            cwd=folder,
            env=environment_of(script, folder),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(options.limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
    if child.returncode:
        late = time.monotonic() - begin > options.limit_s
        lines = log.read_text(errors="replace").strip().splitlines()
        why = f"it took more than {options.limit_s:.0f} s" if late else " ".join(lines[-1:])
        return Outcome(script, why=why or f"exit status {child.returncode}")
    outcome = outcome_of(script, load_result(runs / script.slug))
    outcome.search_s = time.monotonic() - begin
    return outcome


def _arguments(script: Listed, runs: Path, options: Options) -> list[str]:
    """Return the command of the search of a script, after the interpreter."""
    asked = Asked(
        script.command_on(options.cache),
        script.slug,
        str(runs),
        options.probes,
        script.global_batch,
        tuple(script.knobs),
    )
    return ["-m", "benchmarks.scripts.search", json.dumps(asdict(asked))]


def environment_of(script: Listed, folder: Path) -> dict[str, str]:
    """Return the environment in which a script starts: nothing is downloaded by the script."""
    paths = [str(ROOT)]
    if script.path:
        paths.append(str((folder / script.path).resolve()))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    return {
        **os.environ,
        **offline,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def outcome_of(script: Listed, result: Result) -> Outcome:
    """Return the outcome of a search that ended."""
    advice, job = result.recommendation, result.job
    if advice is None or result.run_dir is None:
        return Outcome(script, why="the search ended without an answer")
    assert isinstance(job, ScriptJob)
    records = read_trace(RunFolder(result.run_dir).trace).records
    launched = [record for record in records if record.ok]
    outside = [
        record.energy_J - sum(measured.energy_J for measured in record.measurements)
        for record in launched
    ]
    searched = load_space("default").choices
    turned = [name for name in searched if name in job.offers and job.offers[name].turned]
    saved = advice.action == "train"
    return Outcome(
        script,
        knobs=(*turned, *(knob.name for knob in job.knobs)),
        probes=result.spent.probes,
        failed=result.spent.failed,
        launch_s=statistics.median(record.launch_s for record in launched),
        launch_J=statistics.median(outside),
        energy=-advice.energy.relative if saved and advice.energy else 0.0,
        time=-advice.time.relative if saved and advice.time else 0.0,
        answer=advice.point.configuration.short if saved else "its own configuration",
        today=(job.frame.micro_batch, job.frame.accumulation, job.global_batch),
    )


def stored(script: Listed, file: Path, probes: int) -> Outcome | None:
    """Return the stored outcome of the same search over the same script; None if there is none."""
    if not file.is_file():
        return None
    kept = json.loads(file.read_text())
    if kept.pop("of") != _identity(script, probes):
        return None
    lists = {name: tuple(kept[name]) for name in ("knobs", "today")}
    return Outcome(script, **{**kept, **lists})


def store(outcome: Outcome, file: Path, probes: int) -> None:
    """Write an outcome for `stored`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in vars(outcome).items() if name != "script"}
    kept["of"] = _identity(outcome.script, probes)
    file.write_text(json.dumps(kept, indent=1) + "\n")


def _identity(script: Listed, probes: int) -> list[str]:
    return [script.origin, script.command, *script.knobs, str(probes)]


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return the figures over all scripts, and four for each that was tuned."""
    tuned = [outcome for outcome in outcomes if outcome.tuned]
    found = [
        Figure("scripts_tried", len(outcomes), "count"),
        Figure("scripts_tuned", len(tuned), "count"),
    ]
    if tuned:
        median = statistics.median(len(outcome.knobs) for outcome in tuned)
        found.append(Figure("knobs_in_play_median", median, "count"))
    known = [outcome for outcome in tuned if outcome.script.today]
    right = sum(outcome.today == tuple(outcome.script.today) for outcome in known)
    wrong = sum(
        any(seen not in (0, true) for seen, true in zip(o.today, o.script.today, strict=True))
        for o in known
    )
    if known:
        found += [
            Figure("pinned_today_right", 100 * right / len(known), "%"),
            Figure("pinned_today_wrong", wrong, "count"),
        ]
    for outcome in tuned:
        name = outcome.script.slug.replace("-", "_")
        found += [
            Figure(f"{name}_launch_s", outcome.launch_s, "s"),
            Figure(f"{name}_launch_J", outcome.launch_J, "J"),
            Figure(f"{name}_energy_saved", outcome.energy, "ratio"),
            Figure(f"{name}_time_saved", outcome.time, "ratio"),
        ]
    return found


def main() -> None:
    parser = arguments("searches over training scripts of other projects, unmodified")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="git repositories OWNER/NAME")
    parser.add_argument("--cache", type=Path, default=cache_folder(), metavar="DIR")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--probes", type=int, default=PROBES)
    parser.add_argument("--limit-s", type=float, default=600.0, help="wall time of a search")
    parser.add_argument("--again", action="store_true", help="also those with a stored outcome")
    chosen = parser.parse_args()
    options = Options(chosen.cache.resolve(), chosen.sources, chosen.probes, chosen.limit_s)
    packages, without_dependencies, scripts = listed()
    python = make_environment(options.cache / "environment", packages, without_dependencies)
    inputs = ["-m", "benchmarks.scripts.inputs", str(options.cache / "inputs")]
    subprocess.run([str(python), *inputs], check=True, cwd=ROOT)
    outcomes = []
    for script in scripts:
        if chosen.only and script.name not in chosen.only:
            continue
        file = options.cache / "outcomes" / f"{script.slug}.json"
        outcome = None if chosen.again else stored(script, file, options.probes)
        if outcome is None:
            try:
                folder = prepare(script, options.cache, options.sources)
                outcome = search(script, folder, python, options)
            except Unavailable as error:
                outcome = Outcome(script, why=str(error))
            store(outcome, file, options.probes)
        outcomes.append(outcome)
        print(outcomes[-1].line(), flush=True)
    publish(figures(outcomes), chosen.json)


if __name__ == "__main__":
    main()
