"""How many joules a search pays for the front: any recorded table, replayed, sampler by sampler.

Each group of a table is one problem. A sampler plans in a real study (`tuner.study`); the table
answers with its own noise and charges what a probe would have cost. A run ends when the noise-free
means of what it measured cover the true front's hypervolume to within 1 % (log energy, log time;
the reference is the front's nadir plus 10 % of its range, at least 0.005), or when the table is
spent; a run that never gets there is charged the whole table, point by point. The oracle launches
just the front's launch settings and visits just its live settings. With `--transfer` ours is also
given another group's whole record as earlier measurements: the next group that differs in one of
the grouping columns only, one column after the other. Where a table says which job on which cluster
it recorded (`[predicted_by]`), `joulefront+models` is ours with the analytic models of that job, as
a study has them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.figures import Figure, arguments, publish
from models.analytic import AnalyticModel, Prior
from search_spaces.candidates import Candidates
from search_spaces.configuration import Configuration, Settings
from tuner.acquisition import ProbeCost
from tuner.executors import SimulatedExecutor
from tuner.pareto import hypervolume, nondominated, reference_point
from tuner.sampler import CandidateSampler
from tuner.settings import SamplerDesign
from tuner.stock_samplers import OURS, SAMPLERS, make_sampler
from tuner.study import StudyBook
from tuner.transfer import EarlierPrior, earlier_of_group
from workload.probe import Measurement, ProbeRecord, ProbeRequest
from workload.replay import TableRunner
from workload.table import PredictedBy, RecordedTable, load_table

#: The front is found when this share of its hypervolume at most is missing.
WITHIN = 0.01
DEFAULT_SAMPLERS = (OURS, "tpe", "nsgaii", "random")
#: Ours with the analytic models of what a table recorded.
WITH_MODELS = f"{OURS}+models"
#: Our sampler with one design choice left out or made otherwise.
ABLATIONS = {
    "no-sweep": SamplerDesign(max_live=1, go_on=False),
    "a-setting-at-a-time": SamplerDesign(max_live=1),
    "fill-every-slot": SamplerDesign(in_flight_share=math.inf),
    "sweep-chosen-at-launch": SamplerDesign(go_on=False),
    "no-cost": SamplerDesign(cost_weight=0.0),
    "no-split-kernel": SamplerDesign(split_kernel=False),
    "no-own-level": SamplerDesign(own_level=False),
    "start-of-3-settings": SamplerDesign(start_live=3),
    "start-of-2-launches": SamplerDesign(start_launches=2),
    "start-of-4-launches": SamplerDesign(start_launches=4),
}


@dataclass(frozen=True)
class Truth:
    """One group's noise-free means and what they bound.

    Attributes:
        logs: configuration -> (log energy, log time).
        reference: where hypervolume is counted from.
        whole: the true front's hypervolume.
        whole_kJ: kilojoules of launching every point by itself.
        oracle_kJ, oracle_launches, oracle_measurements: what the oracle pays.
    """

    logs: dict[Any, tuple[float, float]]
    reference: np.ndarray
    whole: float
    whole_kJ: float
    oracle_kJ: float
    oracle_launches: int
    oracle_measurements: int


def truth_of(table: RecordedTable, group: str) -> Truth:
    points = table.group(group).points
    logs = {p.configuration: (math.log(p.energy_J), math.log(p.time_s)) for p in points}
    array = np.array(list(logs.values()))
    reference = reference_point(array)
    on_front = nondominated(array[:, 0], array[:, 1])
    visits: dict[Any, list[float]] = {}
    for point, front in zip(points, on_front, strict=True):
        if front:
            visits.setdefault(point.configuration.launch, []).append(point.power_W)
    return Truth(
        logs=logs,
        reference=reference,
        whole=hypervolume(array, reference),
        whole_kJ=sum(table.cost.energy_J([p.power_W]) for p in points) / 1000,
        oracle_kJ=sum(table.cost.energy_J(powers) for powers in visits.values()) / 1000,
        oracle_launches=len(visits),
        oracle_measurements=sum(map(len, visits.values())),
    )


@dataclass(frozen=True)
class Run:
    """One run of one sampler on one group.

    Attributes:
        kJ, launches, measurements: until the front was found, or the whole table's.
        found: whether it was.
        curve: (kJ, share of the hypervolume missing) after each probe.
        ask_s: the driver's median seconds a plan.
        search_s: how long the search would have taken, seconds on the table's clock.
    """

    sampler: str
    group: str
    seed: int
    kJ: float
    launches: int
    measurements: int
    found: bool
    curve: tuple[tuple[float, float], ...]
    ask_s: float
    search_s: float


def sampler_named(
    name: str,
    candidates: Candidates,
    cost: ProbeCost,
    seed: int,
    earlier: Sequence[Prior] = (),
    recorded: PredictedBy | None = None,
) -> CandidateSampler:
    """A sampler of the benchmark.

    Args:
        recorded: the job and the cluster behind the candidates, which `WITH_MODELS` needs.
    """
    if name == WITH_MODELS:
        assert recorded is not None
        return CandidateSampler(
            candidates,
            prior=AnalyticModel(recorded.job, recorded.cluster),
            cost=cost,
            seed=seed,
            earlier=earlier,
            memory_bytes=float(recorded.cluster.device.memory_bytes),
        )
    if name in ABLATIONS:
        return CandidateSampler(candidates, cost=cost, seed=seed, design=ABLATIONS[name])
    return make_sampler(name, candidates, cost=cost, seed=seed, earlier=earlier)


@lru_cache(maxsize=64)
def earlier_prior(folder: Path, source: str, group: str) -> EarlierPrior:
    """What one group's record says of another's candidates."""
    table = load_table(folder)
    here = Candidates.from_configurations(p.configuration for p in table.group(group).points)
    return EarlierPrior(earlier_of_group(table, source), here)


def neighbour(table: RecordedTable, group: str, column: str) -> str | None:
    """The next group, in the table's order and round, that differs in this column only."""
    names = [each.name for each in table.groups]
    place = names.index(group)
    here = table.groups[place].values
    for each in (*table.groups[place + 1 :], *table.groups[:place]):
        if [name for name in here if each.values.get(name) != here[name]] == [column]:
            return each.name
    return None


def run(
    folder: Path,
    group: str,
    sampler_name: str,
    seed: int,
    in_flight: int = 1,
    most: int = 10**9,
    source: str | None = None,
) -> Run:
    """Search one group until the front is found, `most` points are measured, or none is left.

    Args:
        source: the group of the same table that is known before.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load_table(folder)
    truth = truth_of(table, group)
    executor = SimulatedExecutor(TableRunner(table, group, seed=seed), capacity=in_flight)
    candidates = Candidates.from_configurations(truth.logs)
    earlier = earlier_prior(folder, source, group).means if source is not None else ()
    cost = ProbeCost(**asdict(table.cost))
    sampler = sampler_named(sampler_name, candidates, cost, seed, earlier, table.predicted_by)
    book = StudyBook.in_memory(sampler)
    measured: list[tuple[float, float]] = []
    curve: list[tuple[float, float]] = []
    ask_s: list[float] = []
    kJ, submitted, missing = 0.0, 0, 1.0

    def points_of(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> list[tuple[float, float]]:
        return [truth.logs[Configuration(request.launch, m.live)] for m in windows]

    def missing_of(points: list[tuple[float, float]]) -> float:
        return max(1 - hypervolume(np.array(points), truth.reference) / truth.whole, 0.0)

    def go_on(request: ProbeRequest, windows: Sequence[Measurement]) -> tuple[Settings, ...]:
        if missing_of(measured + points_of(request, windows)) <= WITHIN:
            return ()
        began = time.perf_counter()
        more = book.go_on(ProbeRecord(request, tuple(windows), executor.meter))
        ask_s.append(time.perf_counter() - began)
        return more

    executor.go_on = go_on
    while True:
        while executor.in_flight < in_flight and missing > WITHIN and len(measured) < most:
            if executor.in_flight and sampler.better_to_wait(book.study):
                break
            began = time.perf_counter()
            plan = sampler.plan(book.study)
            ask_s.append(time.perf_counter() - began)
            if plan is None:
                break
            request = ProbeRequest(f"p{submitted:04d}", plan.launch, plan.live, open=plan.open)
            submitted += 1
            book.ask(request)
            executor.submit(request)
        # What is in flight when the front is found was started, and is paid for.
        record = executor.wait()
        if record is None:
            break
        book.tell(record)
        kJ += record.energy_J / 1000
        measured += points_of(record.request, record.measurements)
        missing = missing_of(measured)
        curve.append((kJ, missing))
    found = missing <= WITHIN
    return Run(
        sampler=sampler_name,
        group=group,
        seed=seed,
        kJ=kJ if found else truth.whole_kJ,
        launches=submitted if found else len(truth.logs),
        measurements=len(measured) if found else len(truth.logs),
        found=found,
        curve=tuple(curve),
        ask_s=statistics.median(ask_s),
        search_s=executor.now_s(),
    )


# -- what is said of the runs ----------------------------------------------------------------------


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(list(values), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def spread(values: Iterable[float], digits: int = 0) -> str:
    """ "median (quartile to quartile)"."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def figure_name(name: str) -> str:
    """A sampler's name as part of a figure's."""
    return name.replace("-", "_").replace("+", "_with_")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's step-down correction (Holm 1979)."""
    corrected: dict[str, float] = {}
    worst = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = worst
    return corrected


def significance(medians: dict[str, list[float]]) -> dict[str, float]:
    """Of our joules against each other sampler's, paired by group: Wilcoxon signed rank on the
    logs, two-sided, Holm-corrected. Empty with fewer than two groups."""
    from scipy.stats import wilcoxon

    ours = np.log(medians[OURS])
    p_values = {}
    for name, theirs in medians.items():
        difference = ours - np.log(theirs)
        if name != OURS and len(difference) > 1 and difference.any():
            p_values[name] = float(wilcoxon(difference).pvalue)
    return holm(p_values)


def anytime_figure(runs: Sequence[Run], oracles: dict[str, float]) -> Any:
    """Share of the hypervolume missing against joules over the oracle's: median over seeds, one
    panel a group, a line a sampler, a band between the quartiles."""
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    groups = list(oracles)
    samplers = list(dict.fromkeys(run.sampler for run in runs))
    columns = min(3, len(groups))
    figure = make_subplots(
        rows=math.ceil(len(groups) / columns),
        cols=columns,
        subplot_titles=[g if len(g) < 46 else f"{g[:22]}…{g[-22:]}" for g in groups],
    )
    for place, group in enumerate(groups):
        row, column = place // columns + 1, place % columns + 1
        for colour, sampler in zip(qualitative.D3 * 3, samplers, strict=False):
            mine = [run for run in runs if run.group == group and run.sampler == sampler]
            end = max(run.curve[-1][0] for run in mine) / oracles[group]
            grid = np.geomspace(0.05, max(end, 0.06), 120)
            steps = np.array([_curve_at(run.curve, grid * oracles[group]) for run in mine])
            low, middle, high = np.quantile(100 * steps, [0.25, 0.5, 0.75], axis=0)
            figure.add_scatter(
                x=np.concatenate([grid, grid[::-1]]),
                y=np.concatenate([high, low[::-1]]),
                fill="toself",
                fillcolor=colour,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                row=row,
                col=column,
            )
            figure.add_scatter(
                x=grid,
                y=middle,
                name=sampler,
                legendgroup=sampler,
                showlegend=place == 0,
                line={"color": colour, "width": 2, "shape": "hv"},
                row=row,
                col=column,
            )
        figure.add_vline(x=1.0, line={"dash": "dot", "color": "grey"}, row=row, col=column)
        figure.add_hline(y=100 * WITHIN, line={"dash": "dot", "color": "grey"}, row=row, col=column)
    figure.update_xaxes(type="log", title_text="probing energy / the oracle's", dtick=1)
    figure.update_yaxes(type="log", title_text="hypervolume missing, %", range=[-0.7, 2.05])
    figure.update_layout(
        template="plotly_white",
        height=330 * math.ceil(len(groups) / columns) + 80,
        width=400 * columns + 120,
        legend={"orientation": "h", "y": 1.0, "yanchor": "top", "yref": "container", "x": 0},
        margin={"t": 110},
    )
    return figure


def _curve_at(curve: Sequence[tuple[float, float]], kJ: np.ndarray) -> np.ndarray:
    """The share missing after so many kilojoules; all of it before the first probe ends."""
    spent = np.array([point[0] for point in curve])
    missing = np.concatenate([[1.0], [point[1] for point in curve]])
    return np.asarray(np.maximum(missing[np.searchsorted(spent, kJ, side="right")], 1e-3))


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments("joules that a search pays for the front of recorded tables")
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE_DIR", help="folders with table.toml")
    add(
        "--samplers",
        nargs="+",
        default=list(DEFAULT_SAMPLERS),
        choices=[*SAMPLERS, WITH_MODELS, *ABLATIONS],
        metavar="NAME",
        help=f"of {', '.join(SAMPLERS)}; {WITH_MODELS}, for tables that say what predicts them; "
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


def all_runs(
    options: argparse.Namespace, problems: Sequence[tuple[Path, str]], in_flight: int
) -> dict[tuple[Path, str, str], list[Run]]:
    """Every run, by table, group and sampler; in other processes where asked."""
    keys = [(folder, group, name) for folder, group in problems for name in options.samplers]
    work = [
        (folder, group, name, seed, in_flight, options.most)
        for folder, group, name in keys
        for seed in range(options.seeds)
    ]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            done = list(pool.map(run, *zip(*work, strict=True), chunksize=options.seeds))
    else:
        done = [run(*arguments_of_one) for arguments_of_one in work]
    return {key: done[i * options.seeds : (i + 1) * options.seeds] for i, key in enumerate(keys)}


def main(argv: Sequence[str] | None = None) -> None:
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
    for place in problems:
        truth = truths[place]
        print(
            f"\n{tables[place[0]].name}: {place[1]}: {len(truth.logs)} points; the oracle pays "
            f"{truth.oracle_kJ:.1f} kJ, {truth.oracle_launches} launches, "
            f"{truth.oracle_measurements} measurements"
        )
        print(
            f"  {'sampler':17} {'kJ':>22} {'/oracle':>8} {'launches':>16} {'measured':>16}  found"
        )
        for name in options.samplers:
            runs = found[(*place, name)]
            middle = quartiles(run.kJ for run in runs)[1]
            medians[name].append(middle)
            over_oracle[name].append(middle / truth.oracle_kJ)
            counted[name].append(quartiles(run.measurements for run in runs)[1])
            print(
                f"  {name:17} {spread((run.kJ for run in runs), 1):>22} "
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
            f"  {name:17} {over:6.2f} x the oracle's joules; ours are {ours:.2f} of its{said}; "
            f"{1000 * asks[name]:.0f} ms an ask"
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
    """Ours with more probes in flight: joules and seconds over those of the first number."""
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
    """Ours with another group's record known before: joules over those of ours without."""
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


def last_figures(
    medians: dict[str, list[float]],
    counted: dict[str, list[float]],
    over_oracle: dict[str, list[float]],
) -> list[Figure]:
    """Ours against the rest: a group's best stock sampler is the one with the fewest joules in it
    (for measurements, the fewest measurements)."""
    stock = [name for name in medians if name in SAMPLERS and name != OURS]
    figures = []
    if "random" in medians:
        worst = max(a / b for a, b in zip(medians[OURS], medians["random"], strict=True))
        figures.append(Figure("worst_group_over_random", worst, "ratio"))
    if "tpe" in medians:
        ratios = [a / b for a, b in zip(medians[OURS], medians["tpe"], strict=True)]
        figures.append(Figure("ratio_tpe", geometric_mean(ratios), "ratio"))
    if stock:
        for title, values in (("measurements_best_stock", counted), ("best_stock", medians)):
            best = [min(group) for group in zip(*(values[name] for name in stock), strict=True)]
            ratios = [a / b for a, b in zip(values[OURS], best, strict=True)]
            figures.append(Figure(f"ratio_{title}", geometric_mean(ratios), "ratio"))
            if WITH_MODELS in values:
                ratios = [a / b for a, b in zip(values[WITH_MODELS], best, strict=True)]
                name = f"with_models_ratio_{title}"
                figures.append(Figure(name, geometric_mean(ratios), "ratio"))
    return [*figures, Figure("ratio_oracle", geometric_mean(over_oracle[OURS]), "ratio")]


if __name__ == "__main__":
    main()
