"""Search cost in joules until the front of a recorded table is found, by sampler.

Each group of a table is one problem. A sampler plans in a real study (`tuner.study.recorder`); the
table answers with its noise and charges what a probe would have cost. A run ends when the
noise-free means of its measurements cover the true front's hypervolume to within 1 % (log energy,
log time; the reference is the front's nadir plus 10 % of its range, at least 0.005), or when the
table is exhausted; a run that never gets there is charged the whole table, point by point, and
makes its group one of `groups_never_found`. The oracle launches exactly the front's launch settings
and visits exactly its live settings.

The headline is on jackknifed tables (`--jackknife`), the mean over each group's tables, with tuned,
seen and held-out groups apart (`benchmarks.search.problems`). There a run is also charged until
each point of the front is matched within 2 % on both axes, the cheapest set of measurements stands
beside the oracle (`benchmarks.search.truth`), and ours is also ended by the product's own rule
(`benchmarks.search.own_stop`). With `--questions` a deadline and an energy budget are answered on
them (`benchmarks.search.question`). The tables as recorded follow (`--seeds`): a group's figure is
the median over its seeds. With `--transfer` joulefront also gets the whole record of another group
as earlier measurements: the next one that differs in exactly one grouping column, for each column.
If a table names the job and cluster that it recorded (`[predicted_by]`), `joulefront+models` is
joulefront with the analytic models of that job, as in a study. `joulefront/NAME` is joulefront with
another surrogate (`benchmarks.search.samplers.WITH_SURROGATE`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.ask_tell import PEERS
from benchmarks.search.environments import ENVIRONMENTS, PEERS_VARIABLE, install
from benchmarks.search.external import EXTERNAL
from benchmarks.search.jackknife import Jackknife, jackknife_figures, own_stop_lines
from benchmarks.search.own_stop import own_stops
from benchmarks.search.plot import anytime_figure
from benchmarks.search.problems import Problem
from benchmarks.search.question import answer_searches, question_figures
from benchmarks.search.recorded import in_flight_figures, recorded_figures, transfer_figures
from benchmarks.search.results import write_results
from benchmarks.search.runner import RunOptions, all_runs
from benchmarks.search.samplers import ABLATIONS, DEFAULT_SAMPLERS, NAMES, WITH_MODELS
from benchmarks.search.statistics import figure_name
from benchmarks.search.truth import truth_of
from tuner.search.optuna_samplers import OURS
from tuner.workload.table import load_table


def _parser() -> argparse.ArgumentParser:
    parser = arguments("joules that a search pays for the front of recorded tables")
    parser.prog = "python -m benchmarks.search"
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE_DIR", help="folders with table.toml")
    add(
        "--samplers",
        nargs="+",
        default=list(DEFAULT_SAMPLERS),
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; {WITH_MODELS} is for tables that say what "
        f"predicts them (default: {' '.join(DEFAULT_SAMPLERS)})",
    )
    add(
        "--peers",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help=f"add the samplers of these packages, of {', '.join(ENVIRONMENTS)}; each runs in a "
        f"virtual environment in the folder that {PEERS_VARIABLE} names, or else in a temporary "
        "one, and is installed there if it is missing",
    )
    add("--ablations", action="store_true", help="add ours with each choice left out")
    add("--transfer", action="store_true", help="also give ours another group's record")
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
        "--in-flight",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1],
        metavar="N,...",
        help="probes in flight on the tables as recorded (default 1); of several, the first is "
        "what the samplers are compared at, and ours is run at each",
    )
    add(
        "--most",
        type=int,
        default=400,
        metavar="N",
        help="a run that has not found the front after N measurements counts as one that never "
        "does; what it then misses is printed (default 400)",
    )
    add(
        "--questions",
        action="store_true",
        help="also answer a deadline and an energy budget on the jackknifed tables",
    )
    add("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    add(
        "--results",
        type=Path,
        metavar="FILE",
        help="rewrite the table of jackknifed results in this Markdown file",
    )
    add("--plot", type=Path, metavar="FILE", help="write the anytime curves here, as HTML")
    return parser


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ours is always among the samplers."""
    parser = _parser()
    options = parser.parse_args(argv)
    if min(options.in_flight) < 1 or options.jobs < 1 or options.most < 1:
        parser.error("--in-flight, --jobs and --most must be at least 1")
    if min(options.seeds, options.jackknife) < 0 or not options.seeds + options.jackknife:
        parser.error("--seeds and --jackknife must be at least 0, and one of them at least 1")
    if options.results is not None and not options.jackknife:
        parser.error("--results needs jackknifed tables; --jackknife must be at least 1")
    for name in options.peers:
        if name not in ENVIRONMENTS:
            parser.error(f"--peers: {name!r} is none of {', '.join(ENVIRONMENTS)}")
    extra = [sampler for name in options.peers for sampler in EXTERNAL[name]]
    extra += list(ABLATIONS) if options.ablations else []
    # Ours is what the others are compared with.
    options.samplers = list(dict.fromkeys([OURS, *options.samplers, *extra]))
    return options


@contextmanager
def peers_installed(names: Sequence[str]) -> Iterator[None]:
    """Install the packages of peers for the time of a `with` block, and print what is skipped.

    Without a folder in the environment variable a temporary one is made, and removed in the end.
    """
    with ExitStack() as stack:
        if names and not os.environ.get(PEERS_VARIABLE):
            os.environ[PEERS_VARIABLE] = stack.enter_context(TemporaryDirectory())
            stack.callback(os.environ.pop, PEERS_VARIABLE)
        for name in names:
            if reason := install(name):
                print(f"{name}: {reason}")
        yield


def main(argv: Sequence[str] | None = None) -> None:
    """Run all samplers on all groups, print a line for each, and publish the figures."""
    options = options_of(argv)
    with peers_installed(options.peers):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Run the benchmark with these options."""
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
    if not problems:
        raise SystemExit(f"no group of these tables is named like {options.group!r}")
    figures: list[Figure] = []
    if options.jackknife:
        figures += jackknife_part(options, problems)
    if options.seeds:
        figures += recorded_part(options, problems)
    print(f"({time.perf_counter() - began:.0f} s)")
    publish(figures, options.json)


def jackknife_part(options: argparse.Namespace, problems: Sequence[Problem]) -> list[Figure]:
    """Run the samplers on jackknifed tables; the seed of a table is also that of its run."""
    runs, stops = {}, {}
    for seed in range(options.jackknife):
        tables = [Problem(problem.folder, problem.group, seed) for problem in problems]
        each = RunOptions(tuple(options.samplers), (seed,), options.most, True, options.jobs)
        runs |= all_runs(each, tables)
        stops |= own_stops(tables, (seed,), options.jobs)
    made = Jackknife(runs, stops)
    made.print_groups()
    if options.results is not None:
        write_results(made, options.results)
    figures = jackknife_figures(made)
    if options.questions:
        tables = list(dict.fromkeys(problem for problem, _ in runs))
        searches = answer_searches(tables, options.most, options.jobs)
        figures += question_figures(searches)
    return figures


def recorded_part(options: argparse.Namespace, problems: Sequence[Problem]) -> list[Figure]:
    """Run the samplers on the tables as recorded."""
    seeds, in_flight = tuple(range(options.seeds)), options.in_flight[0]
    each = RunOptions(tuple(options.samplers), seeds, options.most, jobs=options.jobs)
    found = all_runs(each, problems, in_flight)
    figures, last = recorded_figures(each, problems, found)
    stops = own_stops(problems, seeds, options.jobs)
    folders = dict.fromkeys(problem.folder for problem in problems)
    for folder in folders:
        name = load_table(folder).name
        print(f"{name}:")
        by_group = [stops[problem] for problem in problems if problem.folder == folder]
        end = f"_{figure_name(name)}" if len(folders) > 1 else ""
        figures += own_stop_lines(by_group, "own_stop", end)
    if len(options.in_flight) > 1:
        figures += in_flight_figures(each, options.in_flight, problems, found)
    if options.transfer:
        figures += transfer_figures(each, in_flight, problems, found)
    if options.plot is not None:
        runs = [run for several in found.values() for run in several]
        oracles = {problem.group: truth_of(problem).oracle_kJ for problem in problems}
        anytime_figure(runs, oracles).write_html(options.plot, include_plotlyjs=True)
        print(f"anytime curves: {options.plot}")
    return [*figures, *last]


if __name__ == "__main__":
    main()
