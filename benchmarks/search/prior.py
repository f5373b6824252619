"""What the models' prior is worth to a search: exact, wrong, and of simulated clusters.

The prior is exact on jackknifed recorded tables if the search is given their noise-free means as
its models: `perfect_prior_over_oracle_tuned` and `..._held_out` are the joules over the oracle's.
With means that are wrong in a known way (`benchmarks.search.recorded_priors`),
`wrong_prior_joules_ratio_KIND_SPLIT` is the joules over those without a prior, the geometric mean
over the groups, and `wrong_prior_worst_ratio_KIND_SPLIT` that of the worst group. Other jackknifed
tables of a group have their halves wrong in other ways: a multiple of four tables has all of them.

The shipped models are wrong on simulated clusters whose constants, values of launch knobs, pairs of
these, slopes over the clock and thresholds depart from them (`benchmarks.simulated_tables`):
`models_prior_joules_ratio` is the search's joules with the shipped models over those without, the
geometric mean over the tables; `models_prior_worst_ratio` is that of the worst table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.names import OURS
from benchmarks.search.problems import Problem, load_problem, never_binds, split_of
from benchmarks.search.recorded_priors import WRONG
from benchmarks.search.runner import run
from benchmarks.search.samplers import WITH_MODELS, WITH_RECORDED, WITH_TRUTH
from benchmarks.search.statistics import figure_name, geometric_mean
from benchmarks.search.truth import truth_of
from benchmarks.simulated_tables import PROBLEMS, Recorded, record
from tuner.workload.table import load_table

#: Log-sd of the departures of simulated tables: of the constants, of each value of a launch knob,
#: of what the kernel does not assume, and of each launch.
SPREAD, OF_VALUES, BEYOND, OF_LAUNCHES = 0.2, 0.05, 0.05, 0.02
#: Measurements after which a search of a simulated table counts as one that never ends.
MOST = 150


def recorded_priors(folders: Sequence[Path], tables: int) -> list[Figure]:
    """Search jackknifed tables with exact and with wrong means as the models, and print the joules.

    Args:
        folders: of the recorded tables.
        tables: jackknifed tables of each group.
    """
    exact: dict[str, list[float]] = {}
    wrong: dict[tuple[str, str], list[float]] = {}
    for folder in folders:
        table = load_table(folder)
        for group in table.groups:
            if never_binds(load_problem(Problem(folder, group.name)).groups[0]):
                continue
            split = split_of(table.name, group.name)
            over, ratios = _of_group([Problem(folder, group.name, n) for n in range(tables)])
            exact.setdefault(split, []).append(over)
            for kind, ratio in ratios.items():
                wrong.setdefault((kind, split), []).append(ratio)
            said = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
            print(
                f"  {table.name}: {group.name}: {over:.2f} x the oracle's joules with an exact "
                f"prior; with a wrong one over those without: {said}",
                flush=True,
            )
    figures = [
        Figure(f"perfect_prior_over_oracle_{split}", geometric_mean(values), "ratio")
        for split, values in exact.items()
    ]
    for (kind, split), values in wrong.items():
        name = f"{figure_name(kind)}_{split}"
        figures += [
            Figure(f"wrong_prior_joules_ratio_{name}", geometric_mean(values), "ratio"),
            Figure(f"wrong_prior_worst_ratio_{name}", max(values), "ratio"),
        ]
    return figures


def _of_group(problems: Sequence[Problem]) -> tuple[float, dict[str, float]]:
    """Return an exact prior's joules over the oracle's, and each wrong one's over those without.

    Each is a geometric mean over the jackknifed tables of one group.
    """

    def kJ(name: str) -> list[float]:
        return [run(problem, name, problem.jackknife or 0).kJ for problem in problems]

    without = kJ(OURS)
    oracle = [truth_of(problem).oracle_kJ for problem in problems]
    ratios = {
        kind: _ratio(kJ(name), without)
        for name, kind in WITH_RECORDED.items()
        if kind in WRONG and WRONG[kind](problems[0]) is not None
    }
    return _ratio(kJ(WITH_TRUTH), oracle), ratios


def _ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the geometric mean of the paired ratios."""
    return geometric_mean([a / b for a, b in zip(values, others, strict=True)])


def simulated_problem(
    home: Path, job: str, cluster: str, space: str, seed: int, launches: int
) -> tuple[Problem, Recorded]:
    """Write a simulated table that departs from the models in every way, and return its problem.

    Args:
        home: a folder for the table's.
        job, cluster, space: their names.
        seed: of the departures.
        launches: of the table at most.
    """
    folder = home / f"{job}-{seed}"
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
    return Problem(folder, load_table(folder).groups[0].name), made


def models_prior(tables: int, launches: int) -> list[Figure]:
    """Search simulated tables with the models and without, and print the joules of each.

    Args:
        tables: of each job and cluster.
        launches: of a table at most.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as home:
        for job, cluster, space in PROBLEMS:
            for seed in range(tables):
                problem, made = simulated_problem(Path(home), job, cluster, space, seed, launches)
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
    figures = recorded_priors(options.tables, options.jackknife)
    figures += models_prior(options.simulated, options.launches)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
