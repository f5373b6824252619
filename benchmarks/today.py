"""What a look at a script takes today to be, against what it trains: `python -m benchmarks.today`.

Small scripts state their batches in ways that are easily read wrongly (`benchmarks.today_scripts`).
Each is really started under the hook, as an inspection does, and once more where that proves what
its arguments do. A value is right, wrong, or unknown; wrong is also a number where none is right,
and a knob that would change the training. `knobs_found_without_a_word` is the median over the
scripts that accumulate and whose arguments carry such a knob, `knobs_missed` what was not found of
all. `look_s` is what the counted steps cost after the first, `proof_s` what further launches cost.

The scripts of the research (`folders`) and the pinned ones of `benchmarks.scripts` (`--cache DIR`,
its folder) are included where they are at hand; what is left out is printed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.scripts.__main__ import Listed, environment_of, listed, prepare
from benchmarks.scripts.environment import Unavailable
from benchmarks.today_scripts import GIVEN, OWN, UNKNOWN, Case, Truth
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, inspect_script
from tuner.workload.scripts.routes import BATCH_SPLIT
from tuner.workload.scripts.script_job import ScriptJob


@dataclass(frozen=True)
class Look:
    """What one look finds.

    Attributes:
        found: (micro-batch, accumulation, global batch), None for unknown.
        turned: the knobs that split the batch, found without a word from the user.
        look_s: time of the launch after its first step, seconds.
        proof_s: time of the launches that prove what its arguments do, seconds.
    """

    found: Truth
    turned: tuple[str, ...] = ()
    look_s: float = float("nan")
    proof_s: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """A script, what it trains, and what a look finds.

    Attributes:
        turns: the knobs that its arguments carry; None where nobody said.
    """

    name: str
    truth: Truth
    look: Look
    turns: tuple[str, ...] | None = None

    @property
    def verdict(self) -> str:
        """ "right", "wrong" or "unknown"; the worst of the values counts.

        A knob that changes the training is wrong, too.
        """
        pairs = list(zip(self.look.found, self.truth, strict=True))
        if any(found is not None and found != truth for found, truth in pairs):
            return "wrong"
        if self.turns is not None and not {*self.look.turned} <= {*self.turns}:
            return "wrong"
        return "right" if all(found is not None for found, _ in pairs) else "unknown"

    @property
    def accumulates(self) -> bool:
        """True if the script splits its batch."""
        return (self.truth[1] or 0) > 1


def scripts(work: Path, folders: list[Path]) -> Iterator[tuple[Case, Script]]:
    """Write the own scripts to a folder; yield each and the known ones of other folders."""
    for number, case in enumerate(OWN):
        path = work / f"own{number}.py"
        path.write_text(case.source)
        launcher = f"torchrun --nproc-per-node {case.ranks} " if case.ranks > 1 else ""
        yield case, Script(f"{launcher}{path.name} {case.words}".strip(), cwd=work)
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        if path.stem in GIVEN:
            case = Case(path.stem, "", GIVEN[path.stem], turns=())
            yield case, Script(path.name, cwd=path.parent)


def look(runner: LocalRunner, script: Script, cluster: Cluster) -> Look:
    """Look at one script."""
    records: list[ProbeRecord] = []

    def run(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        records.append(runner.run_of(job, request))
        return records[-1]

    try:
        blank = blank_job(script, cluster)
        job = inspect_script(script, blank, run, cluster=cluster, folder=runner.node.run_dir)
    except InputError as error:
        return Look((None, None, None), why=str(error))
    frame = job.frame
    return Look(
        (frame.micro_batch or None, frame.accumulation or None, job.global_batch or None),
        _turned(job),
        records[0].wall_s - frame.first_step_s,
        sum(record.wall_s for record in records[1:]),
        _why(job),
    )


def _turned(job: ScriptJob) -> tuple[str, ...]:
    """Return the knobs that split the batch and can be turned."""
    found = [name for name in ("micro_batch", "data_parallel") if job.offers[name].turned]
    return (*found, *["gradient_accumulation"] * (BATCH_SPLIT.accumulates(job) and bool(found)))


def _why(job: ScriptJob) -> str:
    """Return what the look says of the batch, in a line."""
    notes = [note for note in job.assumed if "predicted" not in note]
    source = job.frame.sources.get("micro_batch", "")
    offers = [
        job.offers[n].why for n in ("micro_batch", "data_parallel") if not job.offers[n].turned
    ]
    return "; ".join([source, *notes[:1], *dict.fromkeys(offers)])


def measured(folders: list[Path], cluster: Cluster) -> list[Seen]:
    """Look at every script."""
    seen = []
    with tempfile.TemporaryDirectory() as work:
        every = list(scripts(Path(work), folders))
        first = blank_job(every[0][1], cluster)
        with closing(LocalRunner(first, cluster, run_dir=Path(work, "run"))) as runner:
            runner.prepare()
            for case, script in every:
                found = look(runner, script, cluster)
                each = Seen(case.name, case.truth, found, case.turns)
                seen.append(each)
                _show(each)
    return seen


def _show(each: Seen) -> None:
    look = each.look
    print(
        f"{each.verdict:8} {each.name:48} {look.found} turned "
        f"{','.join(look.turned) or 'none'}: {look.why}",
        flush=True,
    )


def pinned(cache: Path, sources: Path | None) -> list[Seen]:
    """Look at the pinned scripts of `benchmarks.scripts` whose batches somebody read."""
    seen = []
    for script in listed()[2]:
        if not script.today:
            print(f"left out {script.name}: nobody read what it trains", flush=True)
            continue
        try:
            found = _looked_there(script, cache, prepare(script, cache, sources))
        except (Unavailable, OSError) as error:
            print(f"left out {script.name}: {error}", flush=True)
            continue
        micro, times, whole = script.today
        seen.append(Seen(script.name, (micro, times, whole), found))
        _show(seen[-1])
    return seen


def _looked_there(script: Listed, cache: Path, folder: Path) -> Look:
    """Return the look of the environment's own interpreter, or why there is none."""
    python = cache / "environment" / "bin" / "python"
    command = [str(python), "-m", "benchmarks.today", "--look", script.command_on(cache)]
    done = subprocess.run(
        command, cwd=folder, env=environment_of(script, folder), capture_output=True, text=True
    )
    lines = (done.stdout if not done.returncode else done.stderr).strip().splitlines() or [""]
    if done.returncode:
        return Look(UNKNOWN, why=lines[-1])
    told = json.loads(lines[-1])
    lists = {name: tuple(told[name]) for name in ("found", "turned")}
    return Look(**{**told, **lists})


def look_here(command: str, cluster: Cluster) -> Look:
    """Look at the script of a command in the current folder."""
    script = Script(command)
    with tempfile.TemporaryDirectory() as work:
        try:
            blank = blank_job(script, cluster)
        except InputError as error:
            return Look(UNKNOWN, why=str(error))
        with closing(LocalRunner(blank, cluster, run_dir=Path(work))) as runner:
            runner.prepare()
            return look(runner, script, cluster)


def figures_of(seen: list[Seen]) -> list[Figure]:
    """Return the figures of looks."""
    counts = {v: sum(s.verdict == v for s in seen) for v in ("right", "wrong", "unknown")}
    costs = [s.look.look_s for s in seen if s.look.look_s == s.look.look_s]
    proofs = [s.look.proof_s for s in seen if s.look.proof_s]
    split = [s for s in seen if s.turns and s.accumulates]
    return [
        Figure("today_wrong", counts["wrong"], "count"),
        Figure("today_right", 100 * counts["right"] / len(seen), "%"),
        Figure("today_unknown", 100 * counts["unknown"] / len(seen), "%"),
        Figure(
            "knobs_found_without_a_word",
            statistics.median(len(s.look.turned) for s in split),
            "count",
        ),
        Figure(
            "knobs_missed", sum(len({*(s.turns or ())} - {*s.look.turned}) for s in seen), "count"
        ),
        Figure("look_s", statistics.median(costs), "s"),
        Figure("look_most_s", max(costs), "s"),
        Figure("proof_s", statistics.median(proofs), "s"),
    ]


def main() -> int:
    """Print the figures; 1 if a value is wrong."""
    parser = arguments(__doc__ or "")
    parser.add_argument("folders", nargs="*", type=Path, help="folders with more known scripts")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="of benchmarks.scripts")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="git repositories OWNER/NAME")
    parser.add_argument("--look", metavar="COMMAND", help="print one look as JSON, and no figures")
    options = parser.parse_args()
    cluster = replace(detect_cluster(), devices_per_node=2)
    if options.look:
        print(json.dumps(asdict(look_here(options.look, cluster))))
        return 0
    seen = measured(options.folders, cluster)
    if options.cache:
        seen += pinned(options.cache.resolve(), options.sources)
    missing = {*GIVEN} - {each.name for each in seen}
    if missing:
        print(f"left out: {len(missing)} of the {len(GIVEN)} scripts of the research (folders)")
    if not options.cache:
        print("left out: the pinned scripts of benchmarks.scripts (--cache DIR)")
    publish(figures_of(seen), options.json)
    return 1 if any(s.verdict == "wrong" for s in seen) else 0


if __name__ == "__main__":
    raise SystemExit(main())
