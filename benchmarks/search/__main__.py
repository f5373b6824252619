"""Joules that searches of recorded tables pay, at their own stop and until the front is found.

Each group of a table is one problem. A sampler plans in a real study; the table answers with its
noise and charges what a probe would have cost. The front is found when the noise-free means of the
measurements cover the true front's hypervolume to within 1 % (log energy, log time; the reference
is the front's nadir plus 10 % of its range, at least 0.005); a run that never gets there is charged
the whole table, point by point. The oracle launches exactly the front's launch settings and visits
exactly its live settings. Every search starts at the user's baseline or at a launch drawn at random
(`benchmarks.search.start`).

The headline is what a search pays until it ends itself, by kind of table, beside the peers that end
themselves (`benchmarks.search.headline`): the given tables jackknifed (`--jackknife`) and as
recorded (`--seeds`), and those that are made (`--made`, `benchmarks.search.made_up`). kareus has a
figure of its own beside other tables. On jackknifed tables tuned, seen and held-out groups also
stand apart (`benchmarks.search.problems`). If a table names the job and cluster that it recorded
(`[predicted_by]`), `joulefront+models` is joulefront with the analytic models of that job, as in a
study.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import Figure, arguments, publish
from benchmarks.pieces import Pieces
from benchmarks.search.ask_tell import PEERS
from benchmarks.search.headline import (
    Kind,
    figure_name,
    kind_figures,
    over_all,
    search_lines,
    split_figures,
)
from benchmarks.search.made_up import KINDS, problems_of
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import ending, own_stops, search_to_own_stop
from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.runner import RunOptions, all_runs
from benchmarks.search.samplers import DEFAULT_SAMPLERS, NAMES, SWEEPING, WITH_MODELS
from benchmarks.search.truth import truth_of
from tuner.recordings.table import load_table

#: Seeds of the searches of each kind of table that is made.
MADE_SEEDS = (0, 1)
#: Code that the result of a search depends on.
SEARCH = ("tuner/search", "tuner/problem", "tuner/study", "models")
#: Table of many launches whose figure stands alone.
KAREUS = "kareus-attention-a100"


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "search")
    add = parser.add_argument
    add("tables", nargs="*", type=Path, metavar="TABLE_DIR", help="folders with table.toml")
    add(
        "--made",
        type=lambda text: [word for word in text.split(",") if word],
        metavar="KIND,...",
        help=f"also search tables that are made, of {', '.join(KINDS)} (default: all without a "
        "TABLE_DIR, else none)",
    )
    add(
        "--samplers",
        nargs="+",
        default=list(DEFAULT_SAMPLERS),
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; {WITH_MODELS} is for tables that say what "
        f"predicts them (default: {' '.join(DEFAULT_SAMPLERS)})",
    )
    add("--group", default="", metavar="TEXT", help="only groups whose name holds this")
    add(
        "--jackknife",
        type=int,
        default=8,
        metavar="N",
        help="jackknifed tables of each group, one run each; 0 for none (default 8)",
    )
    add(
        "--seeds",
        type=int,
        default=20,
        metavar="N",
        help="runs a sampler and group on the tables as recorded; 0 for none (default 20)",
    )
    add(
        "--most",
        type=int,
        default=400,
        metavar="N",
        help="a run that has not found the front after N measurements counts as one that never "
        "does; what it then misses is printed (default 400)",
    )
    add("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    add(
        "--pieces",
        type=Path,
        metavar="FILE",
        help="keep each finished search here, and go on from what is kept of this search's code",
    )
    return parser


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ours is always among the samplers."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.made is None:
        options.made = [] if options.tables else list(KINDS)
    if unknown := [kind for kind in options.made if kind not in KINDS]:
        parser.error(f"--made: {unknown[0]!r} is none of {', '.join(KINDS)}")
    if not options.tables and not options.made:
        parser.error("give a TABLE_DIR, or kinds of tables with --made")
    if options.jobs < 1 or options.most < 1:
        parser.error("--jobs and --most must be at least 1")
    if min(options.seeds, options.jackknife) < 0 or not options.seeds + options.jackknife:
        parser.error("--seeds and --jackknife must be at least 0, and one of them at least 1")
    options.pieces = Pieces(options.pieces, options.jobs, folders=SEARCH)
    # Ours is what the others are compared with.
    options.samplers = list(dict.fromkeys([OURS, *options.samplers]))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    run(options_of(argv))


def run(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    tables = {folder: load_table(folder) for folder in options.tables}
    unsaid = [table.name for table in tables.values() if table.predicted_by is None]
    if unsaid and WITH_MODELS in options.samplers:
        raise SystemExit(f"{WITH_MODELS} needs [predicted_by], which {unsaid[0]!r} does not have")
    for name in [name for name in options.samplers if name in PEERS and PEERS[name].missing()]:
        print(f"{name} is skipped: {PEERS[name].missing()}")
        options.samplers.remove(name)
    problems = [
        Problem(folder, group.name)
        for folder, table in tables.items()
        for group in table.groups
        if options.group in group.name
    ]
    if options.tables and not problems:
        raise SystemExit(f"no group of these tables is named like {options.group!r}")
    kareus = [one for one in problems if load_problem(one).name == KAREUS]
    others = [one for one in problems if one not in kareus] or kareus
    figures: list[Figure] = []
    if options.jackknife and others:
        figures += jackknife_part(options, others)
    if options.seeds and others:
        figures += recorded_part(options, others)
    for problem in kareus:
        stop = search_to_own_stop(problem, 0)
        over = stop.kJ / truth_of(problem).oracle_kJ
        missing = 100 * stop.missing
        print(
            f"\n{KAREUS} at its own stop: {over:.2f} x the oracle's joules, {missing:.1f} % missing"
        )
        figures += [
            Figure("kareus_over_oracle", over, "ratio"),
            Figure("kareus_missing", missing, "%"),
        ]
    figures += made_part(options)
    print(f"({time.perf_counter() - began:.0f} s)")
    publish([*figures, *over_all(figures), search_lines()], options.json)


def jackknife_part(options: argparse.Namespace, problems: Sequence[Problem]) -> list[Figure]:
    """Run the samplers on jackknifed tables; the seed of a table is also that of its run."""
    runs, stops = {}, {}
    for seed in range(options.jackknife):
        tables = [Problem(problem.folder, problem.group, seed) for problem in problems]
        each = RunOptions(tuple(options.samplers), (seed,), options.most, options.pieces)
        runs |= all_runs(each, tables)
        stops |= own_stops(tables, (seed,), ending(options.samplers), options.pieces)
    kind = Kind("jackknifed", runs, stops)
    return split_figures(kind) + kind_figures(kind)


def recorded_part(options: argparse.Namespace, problems: Sequence[Problem]) -> list[Figure]:
    """Run the samplers on the tables as recorded."""
    seeds = tuple(range(options.seeds))
    each = RunOptions(tuple(options.samplers), seeds, options.most, options.pieces)
    stops = own_stops(problems, seeds, ending(options.samplers), options.pieces)
    return kind_figures(Kind("recorded", all_runs(each, problems), stops))


def made_part(options: argparse.Namespace) -> list[Figure]:
    """Run the samplers that sweep on tables that are made."""
    figures = []
    names = [name for name in options.samplers if name == OURS or name in SWEEPING]
    for kind in options.made:
        with TemporaryDirectory() as folder:
            problems = problems_of(kind, Path(folder))
            each = RunOptions(tuple(names), MADE_SEEDS, options.most, options.pieces)
            runs = all_runs(each, problems)
            ends = ending(names)
            if all(load_problem(one).predicted_by for one in problems):
                ends.append(WITH_MODELS)
            stops = own_stops(problems, MADE_SEEDS, ends, options.pieces)
            figures += kind_figures(Kind(figure_name(kind), runs, stops))
    return figures


if __name__ == "__main__":
    main()
