"""What a user pays: each kind of table searched to the search's own stop, beside peers with one.

A group of a table is one sample: figures are geometric means over groups of those over its tables
and seeds, with the standard error of the logarithm over the groups. No rule of the search takes
part: truth and costs are the table's, and every search has the same start (`start`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import ROOT, Figure
from benchmarks.search.names import OURS
from benchmarks.search.own_stop import OwnStop
from benchmarks.search.problems import SPLITS, Problem, load_problem, split_of
from benchmarks.search.runner import Run
from benchmarks.search.samplers import SWEEPING, WITH_MODELS
from benchmarks.search.truth import truth_of
from tuner.problem.settings import SearchSettings

#: A peer whose own stop loses more than this in the worst tenth of its runs is no rival.
MOST_REGRET = 0.01
#: Begins the figures of searches with the models of a table's job.
MODELLED = "own_stop_over_oracle_modelled"
#: Packages whose lines are those of the search.
PACKAGES = ("tuner/search", "tuner/models/surrogate")


@dataclass(frozen=True)
class Kind:
    """Searches of one kind of table.

    Attributes:
        name: "jackknifed", "recorded", "clock_limit", ...
        runs: that end by the truth, by problem and sampler.
        stops: that end by their own rule, likewise.
    """

    name: str
    runs: Mapping[tuple[Problem, str], Sequence[Run]]
    stops: Mapping[tuple[Problem, str], Sequence[OwnStop]]

    def groups(self, name: str) -> dict[str, list[Problem]]:
        found: dict[str, list[Problem]] = {}
        for problem, sampler in dict.fromkeys([*self.runs, *self.stops]):
            if sampler == name:
                group = f"{problem.folder.name}: {problem.group}"
                found.setdefault(group, []).append(problem)
        return found

    def _each(
        self, of: Mapping[tuple[Problem, str], Sequence[Run | OwnStop]], name: str
    ) -> dict[str, float]:
        """Return joules over the oracle's of each group."""
        return {
            group: geometric_mean(
                [one.kJ / truth_of(p).oracle_kJ for p in problems for one in of[p, name]]
            )
            for group, problems in self.groups(name).items()
            if (problems[0], name) in of
        }

    def to_truth(self, name: str) -> dict[str, float]:
        """Return what each group costs until the front is found, over the oracle's joules."""
        return self._each(self.runs, name)

    def to_stop(self, name: str) -> dict[str, float]:
        """Return what each group costs until the sampler's own stop, over the oracle's joules."""
        return self._each(self.stops, name)

    def regrets(self, name: str) -> list[float]:
        """Return the front regret of each search by a sampler: at its own stop or, without one, at
        the joules of our stop on the same problem."""
        if name in self.ending:
            return [
                one.front_regret for key, of in self.stops.items() if key[1] == name for one in of
            ]
        found = []
        for (problem, who), runs in self.runs.items():
            if who == name:
                pairs = zip(runs, self.stops[problem, OURS], strict=True)
                found += [_regret_at(run, stop.kJ) for run, stop in pairs]
        return found

    def missing(self, name: str) -> float:
        """Return the share of the front that the worst tenth of a sampler's own stops misses."""
        stops = [one for (_, who), several in self.stops.items() if who == name for one in several]
        return quantile([one.missing for one in stops], 0.9)

    def of_split(self, split: str) -> Kind:
        """Return the searches of the groups of a split alone."""

        def mine(problem: Problem) -> bool:
            return split_of(load_problem(problem).name, problem.group) == split

        runs = {key: of for key, of in self.runs.items() if mine(key[0])}
        return Kind(self.name, runs, {key: of for key, of in self.stops.items() if mine(key[0])})

    @property
    def searching(self) -> list[str]:
        """The samplers whose runs end by the truth."""
        return list(dict.fromkeys(name for _, name in self.runs))

    @property
    def ending(self) -> list[str]:
        """The samplers with a stop of their own."""
        return list(dict.fromkeys(name for _, name in self.stops))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return float(np.quantile(list(values), share))


def figure_name(name: str) -> str:
    """Return a sampler's name as part of a figure's."""
    return name.replace("-", "_").replace("+", "_with_").replace("/", "_")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def never_found(groups: Iterable[Sequence[Run]], end: str) -> Figure:
    """Print and return in how many groups one of ours never found the front, whatever it paid."""
    missed = sum(not all(run.found for run in runs) for runs in groups)
    print(f"  groups in which a search by {OURS} never found the front: {missed}")
    return Figure(f"groups_never_found{end}", missed, "count")


def mean_and_error(ratios: Mapping[str, float]) -> tuple[float, str]:
    """Return the geometric mean over groups, and it with the standard error of its logarithm."""
    logs, mean = [math.log(value) for value in ratios.values()], geometric_mean([*ratios.values()])
    if len(logs) < 2:
        return mean, f"{mean:.2f}"
    return mean, f"{mean:.2f} (log +-{statistics.stdev(logs) / math.sqrt(len(logs)):.2f})"


def _regret_at(run: Run, kJ: float) -> float:
    """Return the front regret of a run after the probes that fit in so many kilojoules."""
    paid = [regret for at, _, regret in run.curve if at <= kJ]
    return paid[-1] if paid else run.curve[0][2]


def regret_figures(kind: Kind, end: str) -> list[Figure]:
    """Return mean, 90th percentile and worst front regret of each sampler's searches, in per cent
    (a peer's after its name), and in which share of ours that said so it is no more than was asked
    (0.9 is what they say)."""
    figures = []
    for name in dict.fromkeys(who for _, who in [*kind.runs, *kind.stops]):
        found, begin = kind.regrets(name), "" if name == OURS else f"{figure_name(name)}_"
        values = {"mean": statistics.fmean(found), "p90": quantile(found, 0.9), "worst": max(found)}
        figures += [
            Figure(f"{begin}front_regret_{of}_{end}", 100 * each, "%")
            for of, each in values.items()
        ]
    stops = (one for (_, who), several in kind.stops.items() if who == OURS for one in several)
    asked = SearchSettings().front_regret
    if held := [one.front_regret <= asked for one in stops if one.reason == "not_worth_it"]:
        share = statistics.fmean(held)
        print(f"  at most {100 * asked:g} % is lost in {share:.2f} of the searches that ended so")
        figures.append(Figure(f"front_regret_coverage_{end}", share, "ratio"))
    return figures


def print_samplers(kind: Kind, title: str) -> None:
    """Print a line for each sampler: joules over the oracle's, and what it loses of the front."""
    print(f"\n{title}: {len(kind.groups(OURS))} groups; joules over the oracle's")
    print(
        f"  {'sampler':18} {'to the truth':>18} {'at its own stop':>18} "
        f"{'front regret: mean, p90, worst':>31} {'missing (p90)':>14}"
    )
    for name in dict.fromkeys(name for _, name in [*kind.runs, *kind.stops]):
        searched = any(who == name for _, who in kind.runs)
        truth = mean_and_error(kind.to_truth(name))[1] if searched else "-"
        stop = mean_and_error(kind.to_stop(name))[1] if name in kind.ending else "-"
        missing = f"{100 * kind.missing(name):.1f} %" if name in kind.ending else "-"
        found = kind.regrets(name)
        regrets = statistics.fmean(found), quantile(found, 0.9), max(found)
        lost = ", ".join(f"{100 * each:.2f}" for each in regrets) + " %"
        print(f"  {name:18} {truth:>18} {stop:>18} {lost:>31} {missing:>14}")


def kind_figures(kind: Kind) -> list[Figure]:
    """Print a kind's lines, and return its figures."""
    print_samplers(kind, kind.name)
    stop, _ = mean_and_error(kind.to_stop(OURS))
    figures = [
        Figure(f"own_stop_over_oracle_{kind.name}", stop, "ratio"),
        *regret_figures(kind, kind.name),
        Figure(f"missing_p90_{kind.name}", 100 * kind.missing(OURS), "%"),
        *_effort(kind),
    ]
    if WITH_MODELS in kind.ending:
        each = kind.to_stop(WITH_MODELS)
        figures.append(Figure(MODELLED, geometric_mean([*each.values()]), "ratio"))
        for group, value in each.items():
            where = re.sub(r"\W+", "_", group.rpartition(": ")[2])
            figures.append(Figure(f"{MODELLED}_{where}", value, "ratio"))
            print(f"  with the models of its job, at its own stop: {value:.2f} ({group})")
    rivals = {
        name: mean_and_error(kind.to_stop(name))[0]
        for name in kind.ending
        if name not in (OURS, WITH_MODELS) and quantile(kind.regrets(name), 0.9) <= MOST_REGRET
    }
    if rivals:
        best = min(rivals, key=rivals.__getitem__)
        print(f"  the best peer at its own stop is {best}: {rivals[best]:.2f}")
        ratio = stop / rivals[best]
        figures.append(Figure(f"own_stop_over_best_peer_{kind.name}", ratio, "ratio"))
    if not kind.runs:
        return figures
    over, _ = mean_and_error(kind.to_truth(OURS))
    begin = "jackknife" if kind.name == "jackknifed" else kind.name
    figures.append(Figure(f"{begin}_over_oracle", over, "ratio"))
    groups = kind.groups(OURS).values()
    runs = [[run for problem in each for run in kind.runs[problem, OURS]] for each in groups]
    return [*figures, never_found(runs, f"_{kind.name}")]


def split_figures(kind: Kind) -> list[Figure]:
    """Print the figures of tuned, seen and held-out groups apart, and return them."""
    figures = []
    for split in SPLITS:
        part = kind.of_split(split)
        groups = part.groups(OURS)
        if not groups:
            continue
        over = {name: mean_and_error(part.to_truth(name))[0] for name in part.searching}
        stop, missing = mean_and_error(part.to_stop(OURS))[0], 100 * part.missing(OURS)
        print_samplers(part, f"{split} groups, {kind.name}")
        figures += [
            Figure(f"jackknife_over_oracle_{split}", over[OURS], "ratio"),
            Figure(f"own_stop_over_oracle_{split}", stop, "ratio"),
            *regret_figures(part, split),
            Figure(f"missing_p90_{split}", missing, "%"),
        ]
        peers = {name: value for name, value in over.items() if name in SWEEPING}
        if peers:
            best = min(peers, key=peers.__getitem__)
            ratio = over[OURS] / peers[best]
            print(f"  the best peer that sweeps is {best}; {OURS} needs {ratio:.2f} of its joules")
            figures.append(Figure(f"jackknife_over_best_peer_{split}", ratio, "ratio"))
    return figures


def _effort(kind: Kind) -> list[Figure]:
    stops = [one for (_, who), several in kind.stops.items() if who == OURS for one in several]
    relaunches = statistics.fmean(one.relaunches for one in stops)
    cpu_s = sum(one.cpu_s for one in stops) / sum(one.launches for one in stops)
    print(f"  {relaunches:.2f} relaunches a search; {cpu_s:.2f} CPU s of the driver a probe")
    return [
        Figure(f"relaunches_{kind.name}", relaunches, "count"),
        Figure(f"driver_cpu_s_per_probe_{kind.name}", cpu_s, "s"),
    ]


def over_all(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures over all kinds: groups never found, and the worst of the others."""
    found = []
    every: tuple[tuple[str, Callable[[list[float]], float], str], ...] = (
        ("groups_never_found", sum, "count"),
        ("own_stop_over_best_peer", max, "ratio"),
        ("own_stop_over_oracle", max, "ratio"),
        ("front_regret_mean", max, "%"),
        ("front_regret_p90", max, "%"),
        ("front_regret_worst", max, "%"),
        ("front_regret_coverage", min, "ratio"),
        ("missing_p90", max, "%"),
        ("relaunches", max, "count"),
        ("driver_cpu_s_per_probe", max, "s"),
    )
    own = [one for one in figures if not one.name.startswith(MODELLED)]
    for name, of, unit in every:
        if values := [one.value for one in own if one.name.startswith(f"{name}_")]:
            found.append(Figure(name, of(values), unit))
    return found


def search_lines() -> Figure:
    """Return the lines of the search and its surrogates."""
    files = [file for package in PACKAGES for file in (ROOT / package).glob("*.py")]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return Figure("search_lines", lines, "count")
