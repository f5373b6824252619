"""What cheaper and less exact probes are worth to a search: fewer replicas, shorter windows.

The tables are simulated clusters whose truth departs from the models
(`benchmarks.simulated_tables`), with every launch that fits. Each is searched with the models as
the prior, as a study of that job on that cluster is:

- `fewer_replicas_joules_ratio`: with launches on fewer replicas first
  (`tuner.search.fewer_replicas`);
- `short_windows_joules_ratio`: with windows of half the length and sqrt(2) of the noise. This is a
  bound on what shorter windows save: the noise of a window falls no faster with its length.

Both are joules until 1 % of the hypervolume is missing, over those of the search without, geometric
means over the tables and a few searches of each; `..._worst_ratio` is the worst table's.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.prior import BEYOND, MOST, OF_LAUNCHES, OF_VALUES, SPREAD
from benchmarks.search.problems import Problem
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.samplers import WITH_MODELS
from benchmarks.search.statistics import geometric_mean
from benchmarks.simulated_tables import PROBLEMS, record
from tuner.models.analytic.model import AnalyticModel
from tuner.problem.probe_cost import ProbeCost
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.candidates import Candidates
from tuner.study.recorder import StudyRecorder
from tuner.workload.table import load_table


def search_kJ(problem: Problem, seed: int, *, fewer_replicas_first: bool = False) -> float:
    """Return the kilojoules until the front is found; the whole table's if it is not.

    Args:
        problem: a simulated table.
        seed: of the sampler and of the noise.
        fewer_replicas_first: as of `CandidateSampler`.
    """
    search = ProblemSearch(problem, WITH_MODELS, seed, 1, False, None)
    behind = search.table.predicted_by
    assert behind is not None
    search.sampler = CandidateSampler(
        Candidates.from_configurations(search.truth.logs),
        prior=AnalyticModel(behind.job, behind.cluster),
        cost=ProbeCost(**asdict(search.table.cost)),
        seed=seed,
        memory_bytes=float(behind.cluster.device.memory_bytes),
        fewer_replicas_first=fewer_replicas_first,
    )
    search.book = StudyRecorder.in_memory(search.sampler)
    search.run(MOST)
    return search.kJ if search.found else search.truth.whole_kJ


def halve_windows(problem: Problem) -> Problem:
    """Write the table with windows of half the length and sqrt(2) of the noise beside it."""
    folder = problem.folder.with_name(f"{problem.folder.name}-short")
    folder.mkdir()
    (folder / "table.csv").write_bytes((problem.folder / "table.csv").read_bytes())
    text = (problem.folder / "table.toml").read_text()
    factors = {"window_s": 0.5, "time_cv": math.sqrt(2), "power_cv": math.sqrt(2)}
    for name, factor in factors.items():
        line = re.search(rf"^{name} = (.*)$", text, re.MULTILINE)
        assert line is not None
        text = text.replace(line[0], f"{name} = {factor * float(line[1]):.9g}")
    (folder / "table.toml").write_text(text)
    return replace(problem, folder=folder)


def ratios(
    home: Path, tables: Sequence[int], launches: int, searches: int
) -> dict[str, list[float]]:
    """Search simulated tables at each fidelity, and print the joules.

    Args:
        home: a folder for the tables.
        tables: seeds of the tables of each job and cluster.
        launches: of a table at most.
        searches: of each table and fidelity.

    Returns:
        Joules over those of the search without, by fidelity, of each table.
    """
    found: dict[str, list[float]] = {"fewer_replicas": [], "short_windows": []}
    for job, cluster, space in PROBLEMS:
        for seed in tables:
            folder = home / f"{job}-{seed}"
            record(
                folder,
                job,
                cluster,
                space,
                most=launches,
                spread=SPREAD,
                of_values=OF_VALUES,
                error=OF_LAUNCHES,
                seed=seed,
                beyond=BEYOND,
            )
            problem = Problem(folder, load_table(folder).groups[0].name)
            seeds = [seed + 1000 * i for i in range(searches)]
            kJ = geometric_mean([search_kJ(problem, each) for each in seeds])
            of = {
                "fewer_replicas": [
                    search_kJ(problem, each, fewer_replicas_first=True) for each in seeds
                ]
            }
            short = halve_windows(problem)
            of["short_windows"] = [search_kJ(short, each) for each in seeds]
            for name, several in of.items():
                found[name].append(geometric_mean(several) / kJ)
            print(
                f"  {job} on {cluster}, seed {seed}: {kJ:.0f} kJ; fewer replicas first "
                f"{found['fewer_replicas'][-1]:.2f} of it, windows of half the length "
                f"{found['short_windows'][-1]:.2f}",
                flush=True,
            )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("what fewer replicas and shorter windows are worth to a search")
    parser.prog = "python -m benchmarks.search.fidelity"
    parser.add_argument(
        "--tables",
        type=lambda text: [int(word) for word in text.split(",")],
        default=list(range(8)),
        metavar="SEED,...",
        help="tables of each job, by seed (default 0 to 7)",
    )
    parser.add_argument(
        "--searches", type=int, default=1, metavar="N", help="searches of a table (default 1)"
    )
    parser.add_argument(
        "--launches", type=int, default=400, help="of a table at most (default 400)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        found = ratios(Path(home), options.tables, options.launches, options.searches)
    figures = []
    for name, values in found.items():
        figures += [
            Figure(f"{name}_joules_ratio", geometric_mean(values), "ratio"),
            Figure(f"{name}_worst_ratio", max(values), "ratio"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
