"""The headline: joules on jackknifed tables; tuned, seen and held-out groups are never averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.figures import Figure
from benchmarks.search.names import OURS, STOCK
from benchmarks.search.own_stop import OwnStop
from benchmarks.search.problems import SPLITS, Problem, load_problem, split_of
from benchmarks.search.runner import Run
from benchmarks.search.samplers import SWEEPING
from benchmarks.search.statistics import figure_name, geometric_mean, never_found, quantile
from benchmarks.search.truth import Truth, lower_bound, truth_of


def _hypervolume_kJ(run: Run) -> float:
    return run.kJ


def matched_kJ(run: Run) -> float:
    """Return the joules until each point of the front was matched."""
    return run.matched_kJ


@dataclass(frozen=True)
class Jackknife:
    """Runs on jackknifed tables, one per table and sampler.

    Attributes:
        runs: by problem and sampler.
        own_stops: by problem and sampler; empty if not made.
    """

    runs: Mapping[tuple[Problem, str], Sequence[Run]]
    own_stops: Mapping[tuple[Problem, str], Sequence[OwnStop]]

    @cached_property
    def samplers(self) -> list[str]:
        """The samplers, in their order."""
        return list(dict.fromkeys(name for _, name in self.runs))

    def groups(self, split: str | None = None) -> dict[str, list[Problem]]:
        """Return the jackknifed tables of each group, of a split or of all."""
        found: dict[str, list[Problem]] = {}
        for problem in dict.fromkeys(problem for problem, _ in self.runs):
            table = load_problem(problem).name
            if split is None or split_of(table, problem.group) == split:
                found.setdefault(f"{table}: {problem.group}", []).append(problem)
        return found

    def over_oracle(
        self,
        problems: Sequence[Problem],
        name: str,
        kJ: Callable[[Run], float] = _hypervolume_kJ,
    ) -> float:
        """Return one sampler's joules over the oracle's, the geometric mean of one group's runs."""
        return geometric_mean(
            [
                kJ(run) / truth_of(problem).oracle_kJ
                for problem in problems
                for run in self.runs[problem, name]
            ]
        )

    def mean_over_oracle(
        self, split: str, name: str, kJ: Callable[[Run], float] = _hypervolume_kJ
    ) -> float:
        """Return `over_oracle`'s geometric mean over the groups of a split."""
        groups = self.groups(split).values()
        return geometric_mean([self.over_oracle(problems, name, kJ) for problems in groups])

    def print_groups(self) -> None:
        """Print a line for each group and sampler."""
        width = max(18, *map(len, self.samplers))
        for group, problems in self.groups().items():
            print(f"\n{group}: {len(problems)} jackknifed tables")
            print(f"  {'sampler':{width}} {'/oracle':>8} {'least':>6} {'most':>6} {'matched':>8}")
            for name in self.samplers:
                each = [self.over_oracle([problem], name) for problem in problems]
                matched = self.over_oracle(problems, name, matched_kJ)
                print(
                    f"  {name:{width}} {geometric_mean(each):8.2f} {min(each):6.2f} "
                    f"{max(each):6.2f} {matched:8.2f}",
                    flush=True,
                )


def bound_over_oracle(truth: Truth) -> tuple[float, bool]:
    """Return the cheapest set's joules over the oracle's, and whether it is exact."""
    bound = lower_bound(truth)
    return bound.kJ / truth.oracle_kJ, bound.exact


def jackknife_figures(made: Jackknife) -> list[Figure]:
    """Print each split's summary, and return the figures of it."""
    figures = []
    for split in SPLITS:
        groups = made.groups(split)
        if not groups:
            continue
        print(f"\n{split} groups ({len(groups)}), jackknifed (geometric means over the oracle):")
        over = {name: made.mean_over_oracle(split, name) for name in made.samplers}
        for name, value in over.items():
            matched = made.mean_over_oracle(split, name, matched_kJ)
            print(f"  {name:18} {value:6.2f}; each point within 2 %: {matched:6.2f}")
            end = f"{'' if name == OURS else figure_name(name) + '_'}over_oracle_{split}"
            figures.append(Figure(f"jackknife_{end}", value, "ratio"))
            if name == OURS:
                figures.append(Figure(f"jackknife_matched_over_oracle_{split}", matched, "ratio"))
        figures += _peer_figures(made, split, over)
        figures += _bound_figures(groups, split)
        figures += _own_stop_figures(made, groups, split)
        runs = [[r for p in each for r in made.runs[p, OURS]] for each in groups.values()]
        figures.append(never_found(runs, "jackknife_", f"_{split}"))
    return figures


def _peer_figures(made: Jackknife, split: str, over: Mapping[str, float]) -> list[Figure]:
    """Compare ours with the best peer that sweeps, and group by group with the best stock."""
    figures = []
    peers = {name: over[name] for name in made.samplers if name in SWEEPING}
    if peers:
        best = min(peers, key=peers.__getitem__)
        ratio = over[OURS] / peers[best]
        print(f"  the best peer that sweeps is {best}; {OURS} needs {ratio:.2f} of its joules")
        figures.append(Figure(f"jackknife_over_best_peer_{split}", ratio, "ratio"))
    stock = [name for name in made.samplers if name in STOCK]
    if stock:
        ratios = {
            group: made.over_oracle(problems, OURS)
            / min(made.over_oracle(problems, name) for name in stock)
            for group, problems in made.groups(split).items()
        }
        worst = max(ratios, key=ratios.__getitem__)
        print(f"  worst group over its best stock sampler: {ratios[worst]:.2f} ({worst})")
        name = f"jackknife_worst_group_over_best_stock_{split}"
        figures.append(Figure(name, ratios[worst], "ratio"))
    return figures


def _bound_figures(groups: Mapping[str, Sequence[Problem]], split: str) -> list[Figure]:
    each = {
        group: [bound_over_oracle(truth_of(problem)) for problem in problems]
        for group, problems in groups.items()
    }
    bound = geometric_mean([geometric_mean([v for v, _ in values]) for values in each.values()])
    exact = all(exact for values in each.values() for _, exact in values)
    said = "the cheapest set of measurements" if exact else "a lower bound on any set"
    print(f"  {said} within 1 %: {bound:.2f}")
    return [Figure(f"jackknife_bound_over_oracle_{split}", bound, "ratio")]


def _own_stop_figures(
    made: Jackknife, groups: Mapping[str, Sequence[Problem]], split: str
) -> list[Figure]:
    """Print what searches paid and missed at their own stop, and return the two figures."""
    if not made.own_stops:
        return []
    by_group = [
        [one for problem in problems for one in made.own_stops[problem, OURS]]
        for problems in groups.values()
    ]
    over = geometric_mean(
        [
            geometric_mean([one.kJ / truth_of(one.problem).oracle_kJ for one in stops])
            for stops in by_group
        ]
    )
    every = [one for stops in by_group for one in stops]
    missing = 100 * quantile([one.missing for one in every], 0.9)
    print(
        f"  {OURS} at its own stop: {over:.2f} x the oracle's joules, "
        f"{quantile([one.launches for one in every], 0.5):.0f} launches (median); missing "
        f"{100 * quantile([one.missing for one in every], 0.5):.1f} % (median), "
        f"{missing:.1f} % (90th percentile)"
    )
    return [
        Figure(f"own_stop_over_oracle_{split}", over, "ratio"),
        Figure(f"missing_p90_{split}", missing, "%"),
    ]
