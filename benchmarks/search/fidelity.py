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
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.prior import MOST, simulated_problem
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.samplers import WITH_FEWER_REPLICAS, WITH_MODELS
from benchmarks.search.statistics import geometric_mean
from benchmarks.simulated_tables import PROBLEMS


def search_kJ(problem: Problem, sampler: str, seeds: Sequence[int]) -> float:
    """Return the kilojoules until the front is found, the whole table's if it is not.

    Args:
        problem: a simulated table.
        sampler: one of the benchmark's.
        seeds: of the searches, whose geometric mean it is.
    """
    return geometric_mean([run(problem, sampler, seed, most=MOST).kJ for seed in seeds])


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
            problem, _ = simulated_problem(home, job, cluster, space, seed, launches)
            seeds = [seed + 1000 * i for i in range(searches)]
            kJ = search_kJ(problem, WITH_MODELS, seeds)
            of = {
                "fewer_replicas": search_kJ(problem, WITH_FEWER_REPLICAS, seeds),
                "short_windows": search_kJ(halve_windows(problem), WITH_MODELS, seeds),
            }
            for name, joules in of.items():
                found[name].append(joules / kJ)
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
