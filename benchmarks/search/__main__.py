"""Search cost in joules until the front of a recorded table is found, by sampler.

Each group of a table is one problem. A sampler plans in a real study (`tuner.study.recorder`); the
table answers with its own noise and charges what a probe would have cost. A run ends when the
noise-free means of its measurements cover the true front's hypervolume to within 1 % (log energy,
log time; the reference is the front's nadir plus 10 % of its range, at least 0.005), or when the
table is exhausted; a run that never gets there is charged the whole table, point by point. The
oracle launches exactly the front's launch settings and visits exactly its live settings. With
`--transfer` joulefront also gets the whole record of another group as earlier measurements: the
next group that differs in exactly one grouping column, for each column. If a table names the job
and cluster that it recorded (`[predicted_by]`), `joulefront+models` is joulefront with the analytic
models of that job, as in a study. `joulefront/NAME` is joulefront with another surrogate
(`tuner.models.surrogate.surrogate_choice`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.plot import anytime_figure
from benchmarks.search.runner import (
    ABLATIONS,
    DEFAULT_SAMPLERS,
    WITH_MODELS,
    WITH_SURROGATE,
    Run,
    all_runs,
    neighbour,
    run,
    truth_of,
)
from benchmarks.search.statistics import (
    figure_name,
    geometric_mean,
    last_figures,
    quartiles,
    significance,
    spread,
)
from tuner.search.optuna_samplers import OURS, SAMPLERS
from tuner.workload.table import RecordedTable, load_table


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ours is always among the samplers."""
    parser = arguments("joules that a search pays for the front of recorded tables")
    parser.prog = "python -m benchmarks.search"
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE_DIR", help="folders with table.toml")
    add(
        "--samplers",
        nargs="+",
        default=list(DEFAULT_SAMPLERS),
        choices=[*SAMPLERS, WITH_MODELS, *WITH_SURROGATE, *ABLATIONS],
        metavar="NAME",
        help=f"of {', '.join(SAMPLERS)}; {WITH_MODELS}, for tables that say what predicts them; "
        f"with another surrogate: {', '.join(WITH_SURROGATE)}; "
        f"with one choice left out: {', '.join(ABLATIONS)} "
        f"(default: {' '.join(DEFAULT_SAMPLERS)})",
    )
    add("--ablations", action="store_true", help="add ours with each choice left out")
    add("--transfer", action="store_true", help="also give ours another group's record")
    add("--group", default="", metavar="TEXT", help="only groups whose name holds this")
    add("--seeds", type=int, default=20, metavar="N", help="runs a sampler and group (default 20)")
    add(
        "--in-flight",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1],
        metavar="N,...",
        help="probes in flight (default 1); of several, the first is what the samplers are "
        "compared at, and ours is run at each",
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
    add("--plot", type=Path, metavar="FILE", help="write the anytime curves here, as HTML")
    options = parser.parse_args(argv)
    if options.seeds < 1 or min(options.in_flight) < 1 or options.jobs < 1 or options.most < 1:
        parser.error("--seeds, --in-flight, --jobs and --most must be at least 1")
    extra = list(ABLATIONS) if options.ablations else []
    # Ours is what the others are compared with.
    options.samplers = list(dict.fromkeys([OURS, *options.samplers, *extra]))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run all samplers on all groups, print a line for each, and publish the figures."""
    options = options_of(argv)
    began = time.perf_counter()
    tables = {folder: load_table(folder) for folder in options.tables}
    unsaid = [table.name for table in tables.values() if table.predicted_by is None]
    if WITH_MODELS in options.samplers and unsaid:
        raise SystemExit(f"{WITH_MODELS} needs [predicted_by], which {unsaid[0]!r} does not have")
    problems = [
        (folder, group.name)
        for folder, table in tables.items()
        for group in table.groups
        if options.group in group.name
    ]
    if not problems:
        raise SystemExit(f"no group of these tables is named like {options.group!r}")
    found = all_runs(options, problems, options.in_flight[0])
    truths = {place: truth_of(tables[place[0]], place[1]) for place in problems}
    medians: dict[str, list[float]] = {name: [] for name in options.samplers}
    over_oracle: dict[str, list[float]] = {name: [] for name in options.samplers}
    counted: dict[str, list[float]] = {name: [] for name in options.samplers}
    width = max(17, *map(len, options.samplers))
    for place in problems:
        truth = truths[place]
        print(
            f"\n{tables[place[0]].name}: {place[1]}: {len(truth.logs)} points; the oracle pays "
            f"{truth.oracle_kJ:.1f} kJ, {truth.oracle_launches} launches, "
            f"{truth.oracle_measurements} measurements"
        )
        print(
            f"  {'sampler':{width}} {'kJ':>22} {'/oracle':>8} {'launches':>16} {'measured':>16}  "
            "found"
        )
        for name in options.samplers:
            runs = found[(*place, name)]
            middle = quartiles(run.kJ for run in runs)[1]
            medians[name].append(middle)
            over_oracle[name].append(middle / truth.oracle_kJ)
            counted[name].append(quartiles(run.measurements for run in runs)[1])
            print(
                f"  {name:{width}} {spread((run.kJ for run in runs), 1):>22} "
                f"{middle / truth.oracle_kJ:8.2f} {spread(run.launches for run in runs):>16} "
                f"{spread(run.measurements for run in runs):>16}  "
                f"{sum(run.found for run in runs)}/{len(runs)}  "
                f"{100 * quartiles(run.curve[-1][1] for run in runs)[1]:5.1f} %",
                flush=True,
            )
    print(f"\nover {len(problems)} groups (geometric means), {options.seeds} seeds:")
    p_values = significance(medians)
    asks = {
        name: statistics.median(run.ask_s for place in problems for run in found[(*place, name)])
        for name in options.samplers
    }
    figures = []
    for name in options.samplers:
        over = geometric_mean(over_oracle[name])
        ours = geometric_mean([a / b for a, b in zip(medians[OURS], medians[name], strict=True)])
        said = f", Holm-corrected p = {p_values[name]:.2g}" if name in p_values else ""
        print(
            f"  {name:{width}} {over:6.2f} x the oracle's joules; ours are {ours:.2f} of its"
            f"{said}; {1000 * asks[name]:.0f} ms an ask"
        )
        figures += [
            Figure(f"{figure_name(name)}_over_oracle", over, "ratio"),
            Figure(f"{figure_name(name)}_ask_s", asks[name], "s"),
        ]
    if len(options.in_flight) > 1:
        figures += in_flight_figures(options, problems, found)
    if options.transfer:
        figures += transfer_figures(options, tables, problems, found)
    figures += last_figures(medians, counted, over_oracle)
    if options.plot is not None:
        runs = [run for several in found.values() for run in several]
        oracles = {group: truths[folder, group].oracle_kJ for folder, group in problems}
        anytime_figure(runs, oracles).write_html(options.plot, include_plotlyjs=True)
        print(f"anytime curves: {options.plot}")
    print(f"({time.perf_counter() - began:.0f} s)")
    publish(figures, options.json)


def in_flight_figures(
    options: argparse.Namespace,
    problems: Sequence[tuple[Path, str]],
    found: dict[tuple[Path, str, str], list[Run]],
) -> list[Figure]:
    """Run ours with more probes in flight: joules and seconds over those of the first number."""
    first, *others = options.in_flight
    alone = argparse.Namespace(**{**vars(options), "samplers": [OURS]})
    figures = []
    print(f"\nours with several in flight, over {first} in flight (geometric means):")
    for in_flight in others:
        runs = all_runs(alone, problems, in_flight)
        ratios = {}
        for what in ("kJ", "search_s"):
            here, there = (
                [quartiles(getattr(r, what) for r in of[(*p, OURS)])[1] for p in problems]
                for of in (runs, found)
            )
            ratios[what] = geometric_mean([a / b for a, b in zip(here, there, strict=True)])
        print(
            f"  {in_flight:4} in flight: {ratios['kJ']:.2f} x the joules, "
            f"{ratios['search_s']:.2f} x the time"
        )
        figures += [
            Figure(f"in_flight_{in_flight}_joules_ratio", ratios["kJ"], "ratio"),
            Figure(f"in_flight_{in_flight}_time_ratio", ratios["search_s"], "ratio"),
        ]
    return figures


def transfer_figures(
    options: argparse.Namespace,
    tables: dict[Path, RecordedTable],
    problems: Sequence[tuple[Path, str]],
    found: dict[tuple[Path, str, str], list[Run]],
) -> list[Figure]:
    """Run ours with another group's record known before: joules over those of ours without."""
    columns = dict.fromkeys(
        name for table in tables.values() for each in table.groups for name in each.values
    )
    figures = []
    for column in columns:
        print(f"\nours, given the next group that differs in {column} only:")
        ratios = []
        for folder, group in problems:
            source = neighbour(tables[folder], group, column)
            if source is None:
                continue
            runs = [
                run(folder, group, OURS, seed, options.in_flight[0], options.most, source)
                for seed in range(options.seeds)
            ]
            without = quartiles(one.kJ for one in found[folder, group, OURS])[1]
            ratios.append(quartiles(one.kJ for one in runs)[1] / without)
            print(
                f"  {group}, given {source}: {spread((one.kJ for one in runs), 1)} kJ, "
                f"{ratios[-1]:.2f} of {without:.1f} kJ without",
                flush=True,
            )
        if ratios:
            ratio = geometric_mean(ratios)
            print(f"  over {len(ratios)} groups {ratio:.2f} of the joules (geometric mean)")
            name = "".join(c if c.isalnum() else "_" for c in column)
            figures.append(Figure(f"transfer_{name}_joules_ratio", ratio, "ratio"))
    return figures


if __name__ == "__main__":
    main()
