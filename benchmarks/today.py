"""What a look at a script takes today to be, against what it trains: `python -m benchmarks.today`.

Small scripts state their batches in ways that are easily read wrongly (`benchmarks.today_scripts`).
Each is really started under the hook, as an inspection does. A value is right, wrong, or unknown;
wrong is also a number where none is right. `look_s` is what the counted steps cost after the first.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.today_scripts import GIVEN, OWN, Truth
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, inspect_script


@dataclass(frozen=True)
class Seen:
    """One look.

    Attributes:
        found: (micro-batch, accumulation, global batch), None for unknown.
        look_s: time of the launch after its first step, seconds.
    """

    name: str
    truth: Truth
    found: Truth
    look_s: float
    why: str

    @property
    def verdict(self) -> str:
        """ "right", "wrong" or "unknown"; the worst of the three values counts."""
        pairs = list(zip(self.found, self.truth, strict=True))
        if any(found is not None and found != truth for found, truth in pairs):
            return "wrong"
        return "right" if all(found is not None for found, _ in pairs) else "unknown"


def scripts(work: Path, folders: list[Path]) -> Iterator[tuple[str, Script, Truth]]:
    """Write the own scripts to a folder; yield each and the known ones of other folders."""
    for number, case in enumerate(OWN):
        path = work / f"own{number}.py"
        path.write_text(case.source)
        launcher = f"torchrun --nproc-per-node {case.ranks} " if case.ranks > 1 else ""
        yield case.name, Script(f"{launcher}{path.name}", cwd=work), case.truth
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        if path.stem in GIVEN:
            yield path.stem, Script(path.name, cwd=path.parent), GIVEN[path.stem]


def look(runner: LocalRunner, script: Script, cluster: Cluster) -> tuple[Truth, float, str]:
    """Return the batches that one look finds, what it cost over a step, and the first note."""
    records: list[ProbeRecord] = []

    def run(request: ProbeRequest) -> ProbeRecord:
        records.append(runner.run(request))
        return records[-1]

    blank = blank_job(script, cluster)
    runner.turn_to(blank)
    try:
        job = inspect_script(script, blank, run, folder=runner.node.run_dir)
    except InputError as error:
        return (None, None, None), float("nan"), str(error)
    frame = job.frame
    found = (frame.micro_batch or None, frame.accumulation or None, job.global_batch or None)
    notes = [note for note in job.assumed if "predicted" not in note]
    why = frame.sources.get("micro_batch", "") if all(found) else next(iter(notes), "")
    return found, records[-1].wall_s - job.frame.first_step_s, why


def measured(folders: list[Path], cluster: Cluster) -> list[Seen]:
    """Look at every script."""
    seen = []
    with tempfile.TemporaryDirectory() as work:
        every = list(scripts(Path(work), folders))
        first = blank_job(every[0][1], cluster)
        with closing(LocalRunner(first, cluster, run_dir=Path(work, "run"))) as runner:
            runner.prepare()
            for name, script, truth in every:
                seen.append(Seen(name, truth, *look(runner, script, cluster)))
                each = seen[-1]
                print(f"{each.verdict:8} {name:48} {each.found} {each.why}", flush=True)
    return seen


def main() -> int:
    """Print the figures; 1 if a value is wrong."""
    parser = arguments(__doc__ or "")
    parser.add_argument("folders", nargs="*", type=Path, help="folders with more known scripts")
    options = parser.parse_args()
    seen = measured(options.folders, replace(detect_cluster(), devices_per_node=2))
    counts = {v: sum(s.verdict == v for s in seen) for v in ("right", "wrong", "unknown")}
    costs = [each.look_s for each in seen if each.look_s == each.look_s]
    figures = [
        Figure("today_wrong", counts["wrong"], "count"),
        Figure("today_right", 100 * counts["right"] / len(seen), "%"),
        Figure("today_unknown", 100 * counts["unknown"] / len(seen), "%"),
        Figure("look_s", statistics.median(costs), "s"),
        Figure("look_most_s", max(costs), "s"),
    ]
    publish(figures, options.json)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
