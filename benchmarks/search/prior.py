"""What the models' prior is worth to a search: exact, and wrong in ways the kernel does not assume.

The prior is exact on jackknifed recorded tables if the search is given their noise-free means as
its models: `perfect_prior_over_oracle_tuned` and `..._held_out` are the joules over the oracle's.
It is wrong on simulated clusters whose constants, values of launch knobs, pairs of these, slopes
over the clock and thresholds depart from the models (`benchmarks.simulated_tables`):
`models_prior_joules_ratio` is the search's joules with the shipped models over those without, the
geometric mean over the tables; `models_prior_worst_ratio` is that of the worst table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.problems import Problem, load_problem, never_binds, split_of
from benchmarks.search.runner import run
from benchmarks.search.samplers import WITH_MODELS, WITH_TRUTH
from benchmarks.search.statistics import geometric_mean
from benchmarks.search.truth import truth_of
from benchmarks.simulated_tables import PROBLEMS, record
from tuner.search.optuna_samplers import OURS
from tuner.workload.table import load_table

#: Log-sd of the departures of simulated tables: of the constants, of each value of a launch knob,
#: of what the kernel does not assume, and of each launch.
SPREAD, OF_VALUES, BEYOND, OF_LAUNCHES = 0.2, 0.05, 0.05, 0.02
#: Measurements after which a search of a simulated table counts as one that never ends.
MOST = 150


def perfect_prior(folders: Sequence[Path], tables: int) -> list[Figure]:
    """Search jackknifed tables with their own means as the models, and print each group's joules.

    Args:
        folders: of the recorded tables.
        tables: jackknifed tables of each group.
    """
    splits: dict[str, list[float]] = {}
    for folder in folders:
        table = load_table(folder)
        for group in table.groups:
            if never_binds(load_problem(Problem(folder, group.name)).groups[0]):
                continue
            each = []
            for seed in range(tables):
                problem = Problem(folder, group.name, seed)
                found = run(problem, WITH_TRUTH, seed)
                each.append(found.kJ / truth_of(problem).oracle_kJ)
            over = geometric_mean(each)
            splits.setdefault(split_of(table.name, group.name), []).append(over)
            print(f"  {table.name}: {group.name}: {over:.2f} x the oracle's joules", flush=True)
    return [
        Figure(f"perfect_prior_over_oracle_{split}", geometric_mean(values), "ratio")
        for split, values in splits.items()
    ]


def wrong_prior(tables: int, launches: int) -> list[Figure]:
    """Search simulated tables with the models and without, and print the joules of each.

    Args:
        tables: of each job and cluster.
        launches: of a table at most.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as home:
        for job, cluster, space in PROBLEMS:
            for seed in range(tables):
                folder = Path(home) / f"{job}-{seed}"
                made = record(
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
                oracle_kJ = truth_of(problem).oracle_kJ
                both = [run(problem, name, seed, most=MOST).kJ for name in (WITH_MODELS, OURS)]
                ratios.append(both[0] / both[1])
                print(
                    f"  {job} on {cluster}, seed {seed}: {both[0] / oracle_kJ:.2f} x the oracle's "
                    f"joules with the models, {both[1] / oracle_kJ:.2f} without "
                    f"({ratios[-1]:.2f}); rank correlation of energy {made.error.energy_rank:.2f}",
                    flush=True,
                )
    return [
        Figure("models_prior_joules_ratio", geometric_mean(ratios), "ratio"),
        Figure("models_prior_worst_ratio", max(ratios), "ratio"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("what the models' prior is worth to a search")
    parser.prog = "python -m benchmarks.search.prior"
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE_DIR")
    parser.add_argument(
        "--jackknife", type=int, default=2, metavar="N", help="tables of each group (default 2)"
    )
    parser.add_argument(
        "--simulated", type=int, default=3, metavar="N", help="tables of each job (default 3)"
    )
    parser.add_argument(
        "--launches", type=int, default=80, help="launches of a simulated table (default 80)"
    )
    options = parser.parse_args(argv)
    figures = perfect_prior(options.tables, options.jackknife)
    figures += wrong_prior(options.simulated, options.launches)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
