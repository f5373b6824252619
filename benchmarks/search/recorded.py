"""Figures of the tables as recorded: joules by sampler, several in flight."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.figures import Figure
from benchmarks.search.names import OURS
from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.runner import Run, RunOptions, all_runs
from benchmarks.search.statistics import (
    figure_name,
    geometric_mean,
    last_figures,
    quartiles,
    significance,
    spread,
)
from benchmarks.search.truth import truth_of


def recorded_figures(
    options: RunOptions,
    problems: Sequence[Problem],
    found: Mapping[tuple[Problem, str], Sequence[Run]],
) -> tuple[list[Figure], list[Figure]]:
    """Print a line for each group and sampler, and a summary; return the figures.

    Returns:
        Each sampler's own figures, and those that compare ours with the rest.
    """
    medians: dict[str, list[float]] = {name: [] for name in options.samplers}
    over_oracle: dict[str, list[float]] = {name: [] for name in options.samplers}
    counted: dict[str, list[float]] = {name: [] for name in options.samplers}
    width = max(17, *map(len, options.samplers))
    for problem in problems:
        truth = truth_of(problem)
        print(
            f"\n{load_problem(problem).name}: {problem.group}: {len(truth.logs)} points; the "
            f"oracle pays {truth.oracle_kJ:.1f} kJ, {truth.oracle_launches} launches, "
            f"{truth.oracle_measurements} measurements"
        )
        print(
            f"  {'sampler':{width}} {'kJ':>22} {'/oracle':>8} {'launches':>16} {'measured':>16}  "
            "found"
        )
        for name in options.samplers:
            runs = found[problem, name]
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
    print(f"\nover {len(problems)} groups (geometric means), {len(options.seeds)} seeds:")
    figures = _summary(options, problems, found, medians, over_oracle)
    return figures, last_figures(medians, counted, over_oracle)


def _summary(
    options: RunOptions,
    problems: Sequence[Problem],
    found: Mapping[tuple[Problem, str], Sequence[Run]],
    medians: dict[str, list[float]],
    over_oracle: dict[str, list[float]],
) -> list[Figure]:
    """Print a line for each sampler over all groups, and return its figures."""
    width = max(17, *map(len, options.samplers))
    p_values = significance(medians)
    figures = []
    for name in options.samplers:
        plan_s = statistics.median(
            run.plan_s for problem in problems for run in found[problem, name]
        )
        over = geometric_mean(over_oracle[name])
        ours = geometric_mean([a / b for a, b in zip(medians[OURS], medians[name], strict=True)])
        said = f", Holm-corrected p = {p_values[name]:.2g}" if name in p_values else ""
        print(
            f"  {name:{width}} {over:6.2f} x the oracle's joules; ours are {ours:.2f} of its"
            f"{said}; {1000 * plan_s:.0f} ms an ask"
        )
        figures += [
            Figure(f"{figure_name(name)}_over_oracle", over, "ratio"),
            Figure(f"{figure_name(name)}_ask_s", plan_s, "s"),
        ]
    return figures


def in_flight_figures(
    options: RunOptions,
    in_flight_numbers: Sequence[int],
    problems: Sequence[Problem],
    found: Mapping[tuple[Problem, str], Sequence[Run]],
) -> list[Figure]:
    """Run ours with more probes in flight: joules and seconds over those of the first number."""
    first, *others = in_flight_numbers
    alone = replace(options, samplers=(OURS,))
    figures = []
    print(f"\nours with several in flight, over {first} in flight (geometric means):")
    for in_flight in others:
        runs = all_runs(alone, problems, in_flight)
        ratios = {}
        for what in ("kJ", "search_s"):
            here, there = (
                [quartiles(getattr(r, what) for r in of[p, OURS])[1] for p in problems]
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
