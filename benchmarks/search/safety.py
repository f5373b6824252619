"""Windows that exceed a cap on peak power in a search that avoids them and in one that does not.

Each configuration's peak is its recorded mean power times a factor drawn around 1.15, which the
search learns from its windows. The cap lies at a share of the range of the peaks. Both searches
know the question (the least time under the cap) and end when a configuration is measured that meets
it and is within 1 % of the best that does.
"""

from __future__ import annotations

import math
import statistics
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.names import OURS
from benchmarks.search.problems import Problem, load_problem, never_binds
from benchmarks.search.question import WITHIN
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.statistics import geometric_mean
from tuner.problem.constraints import Constraints
from tuner.search.put_off import PeakLimit
from tuner.search.question import Question
from tuner.search_spaces.configuration import Configuration
from tuner.workload.table import load_table

#: Peak over mean power: median, and standard deviation of its log from configuration to another.
PEAK_RATIO, PEAK_LOG_SD = 1.15, 0.04
#: Places of the cap in the range of the peaks, on log axes.
CAPS = (0.5, 0.75)


@dataclass(frozen=True)
class Outcome:
    """One search: windows that exceeded the cap, what it paid, and whether it found the answer."""

    violations: int
    windows: int
    kJ: float
    found: bool


class _CappedSearch(ProblemSearch):
    """A search for the least time under a cap on peak power."""

    def __init__(self, problem: Problem, seed: int, cap: float, safe: bool) -> None:
        super().__init__(problem, OURS, seed, 1, False, None)
        self._safe = safe
        draw = np.random.default_rng([seed, zlib.crc32(problem.group.encode())])
        factors = PEAK_RATIO * np.exp(draw.normal(0, PEAK_LOG_SD, len(self.truth.points)))
        self._power = {p.configuration: p.power_W for p in self.truth.points}
        self.peaks = {c: p * f for (c, p), f in zip(self._power.items(), factors, strict=True)}
        low, high = min(self.peaks.values()), max(self.peaks.values())
        self.cap_W = low ** (1 - cap) * high**cap
        met = [c for c, peak in self.peaks.items() if peak <= self.cap_W]
        least = min(self.truth.logs[c][1] for c in met)
        best = least + math.log1p(WITHIN)
        self._answers = {c for c in met if self.truth.logs[c][1] <= best}
        self._note_ends((), 0.0)

    def _note_ends(self, measured: Sequence[Configuration], kJ: float) -> None:
        known = list(dict.fromkeys(measured))
        peaks = [self.peaks[c] for c in known]
        limit = PeakLimit.of(self.cap_W, peaks, [self._power[c] for c in known])
        limit = replace(limit, limits_hold=True)  # of recorded groups of one scope, the GPUs'
        asked = Constraints(peak_power_W=self.cap_W, power_cap_W=limit.mean_power_W)
        self.ask(Question(asked, 1), limit if self._safe else None)
        if self.found is None and not self._answers.isdisjoint(measured):
            self.found = kJ, self.submitted, len(measured)


def capped_search(problem: Problem, seed: int, cap: float, safe: bool, most: int = 200) -> Outcome:
    """Search one problem under a cap on peak power.

    Args:
        problem: what is searched.
        seed: of the sampler, the noise and the peaks.
        cap: place of the cap in the range of the peaks, 0 to 1.
        safe: leave out what would probably exceed the cap.
        most: number of measurements after which the search ends.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = _CappedSearch(problem, seed, cap, safe)
    search.run(most)
    over = sum(bool(search.peaks[c] > search.cap_W) for c in search.measured)
    paid_kJ = search.found[0] if search.found else search.kJ
    return Outcome(over, len(search.measured), paid_kJ, search.found is not None)


def main() -> None:
    """Search each group under each cap, with and without safety, and print the violations."""
    parser = arguments("windows that exceed a cap on peak power")
    parser.add_argument("table", type=Path, metavar="TABLE_DIR")
    parser.add_argument(
        "--jackknife", type=int, default=2, metavar="N", help="tables of each group"
    )
    options = parser.parse_args()
    groups = [g.name for g in load_table(options.table).groups]
    problems = [
        Problem(options.table, name, seed)
        for name in groups
        if not never_binds(load_problem(Problem(options.table, name)).groups[0])
        for seed in range(options.jackknife)
    ]
    figures = []
    for cap in CAPS:
        found = {
            safe: [capped_search(p, p.jackknife or 0, cap, safe) for p in problems]
            for safe in (False, True)
        }
        for safe, outcomes in found.items():
            share = sum(o.violations for o in outcomes) / sum(o.windows for o in outcomes)
            each = statistics.fmean(o.violations for o in outcomes)
            answered = statistics.fmean(o.found for o in outcomes)
            print(
                f"cap at {cap:.0%} of the range, {'safe' if safe else 'not safe':8}: "
                f"{each:.2f} windows a search exceed it ({share:.1%}); answered in {answered:.0%}"
            )
            end = f"{100 * cap:.0f}{'' if safe else '_without_safety'}"
            figures.append(Figure(f"peak_violations_cap_{end}", each, "count"))
        pairs = zip(found[True], found[False], strict=True)
        ratio = geometric_mean([a.kJ / b.kJ for a, b in pairs if a.found and b.found])
        print(f"  joules of the safe search over the other's, where both answer: {ratio:.2f}")
        figures.append(Figure(f"peak_safety_joules_cap_{100 * cap:.0f}", ratio, "ratio"))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
