"""Error rates of recommendations.

Whole made-up searches whose truth is known: a baseline and nine other configurations, of which the
search measures what its limit of probes leaves room for (one rough window a launch), the baseline
again after some launches, and then launches one at a time while they are worth it, by the product's
own judge (`tuner.answer.judge`). A configuration that truly saves is always among those that the
search measured, at a random place. Launches differ by 1, 3 or 5 % in time and power; with drift the
machine slows down by half a per cent with each launch. `MACHINES` differ in other ways, and there
nothing saves. Nothing is timed, so a busy machine does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from benchmarks.made_up_searches import (
    CONFIGURATIONS,
    EXACT,
    MACHINES,
    SPREADS,
    STEPS,
    Machine,
    Outcome,
    Row,
)
from tuner.answer.judge import Judge, advise, failed_again
from tuner.answer.parts import Point
from tuner.answer.posterior import LaunchPosterior, Windows
from tuner.answer.state import points_of
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings
from tuner.study.rules import REPEAT_AFTER
from tuner.workload.records.probe import ProbeRecord

#: Energy of a launch over that of the training.
LAUNCH_SHARE = 1 / 2000
TRUTHS = ("flat", "worse", "2", "5", "10", "30", "73")
LIMITS = (5, 8, 12, 24)


def judge_of(records: Sequence[ProbeRecord]) -> Judge:
    """Return the judge of what was measured, for the least energy."""
    posterior = LaunchPosterior.of(Windows.of(records))
    points = points_of(posterior, STEPS)
    today = next(p for p in points if p.configuration == CONFIGURATIONS[0])
    verifying = [i for i, r in enumerate(records) if r.request.purpose == "verify"]
    return Judge(
        points,
        today,
        Constraints(objective="energy"),
        STEPS,
        posterior,
        frozenset(verifying),
        failed_again(records),
    )


def search(row: Row, seed: int) -> Outcome:
    """Return the answer of one made-up search."""
    machine = Machine(row, seed)
    records = machine.records
    room = row.limit - SearchSettings(max_probes=row.limit).reserved_probes
    repeats = 0
    for number in machine.candidates(room):
        settings = len({r.request.launch for r in records if r.measurements})
        while repeats < sum(settings >= count for count in REPEAT_AFTER):
            machine.launch(0, "verify")
            repeats += 1
        machine.launch(number, "search")
    launches = 0
    while True:
        judge = judge_of(records)
        best, choice = judge.choose()
        assert best is not None
        more = judge.more(best, LAUNCH_SHARE)
        if more is None or len(records) >= row.limit or row.ended == "interrupted":
            break
        machine.launch(
            0 if more.of_baseline else CONFIGURATIONS.index(best.configuration), "verify"
        )
        launches += 1
    advice = advise(judge, best, met=choice.met)
    off = float(np.mean([_off(machine, point) for point in judge.points]))
    if advice.action == "keep" or advice.energy is None:
        return Outcome(None, launches, off=off)
    saved = -float(machine.logs[CONFIGURATIONS.index(advice.point.configuration)])
    stated, low, high = (
        -math.log1p(v) for v in (advice.energy.relative, advice.energy.high, advice.energy.low)
    )
    return Outcome(saved, launches, stated, low, high, off)


def _off(machine: Machine, point: Point) -> float:
    true = machine.logs[CONFIGURATIONS.index(point.configuration)]
    return abs(math.log(point.time_to_solution_s / STEPS) - float(true))


def exact_error(searches: int) -> Figure:
    """Return how far times are shown off where every launch and window is exact to 0.05 %."""
    off = [100 * search(Row("10", EXACT), 100_000 + i).off for i in range(searches)]
    print(f"exact launches: times are shown {np.mean(off):.2f} % off, {max(off):.2f} % at worst")
    return Figure("exact_error_mean", float(np.mean(off)), "%")


def rows(quick: bool) -> list[Row]:
    """Return every kind of search; with `quick` those that the aims name."""
    kinds = [Row(truth, spread) for spread in SPREADS for truth in TRUTHS]
    kinds += [Row("73", spread, 5) for spread in SPREADS]
    kinds += [Row("flat", spread, 8) for spread in SPREADS]
    kinds += [Row("flat", machine) for machine in MACHINES]
    if quick:
        return kinds
    kinds += [Row(t, s, limit) for s in SPREADS for t in TRUTHS for limit in LIMITS[:-1]]
    kinds += [Row(truth, spread, drift=True) for spread in SPREADS for truth in TRUTHS]
    for ended in ("interrupted", "failed"):
        kinds += [Row(t, s, 12, ended=ended) for s in SPREADS for t in ("flat", "10", "30", "73")]
    return list(dict.fromkeys(kinds))


def measured(kinds: Sequence[Row], trials: int, first: int) -> Iterator[list[Outcome]]:
    """Return the answers of searches of each kind."""
    for row in kinds:
        yield [search(row, first + i) for i in range(trials)]


def told(row: Row, found: Sequence[Outcome]) -> None:
    """Print the answers of searches of one kind in a line."""
    better = [o for o in found if o.saved is not None]
    wrong = sum(o.saved <= 0 for o in better if o.saved is not None)
    name = f"{row.truth + (' %' if row.truth.isdigit() else ''):>6}"
    machine = row.spread if row.spread in MACHINES else f"launches differ by {row.spread} %"
    how = f"{machine}, {row.limit:2} probes"
    how += ", drift" * row.drift + f", {row.ended}" * bool(row.ended)
    print(
        f"{name}, {how}: recommended {len(better) / len(found):.3f}, of which no better "
        f"{wrong / len(found):.3f}; {np.mean([o.launches for o in found]):.1f} launches",
        flush=True,
    )


def figures_of(kinds: dict[Row, list[Outcome]]) -> list[Figure]:
    """Return the figures that have an aim: the worst of the rows that each covers."""

    def share(found: list[Outcome]) -> float:
        return float(np.mean([o.saved is not None for o in found]))

    def false(found: list[Outcome]) -> float:
        return float(np.mean([o.saved is not None and o.saved <= 0 for o in found]))

    def of(truth: str, spreads: str = "135") -> dict[Row, list[Outcome]]:
        return {r: f for r, f in kinds.items() if r.truth == truth and r.spread in spreads}

    def plain(truth: str, spreads: str) -> list[list[Outcome]]:
        every = of(truth, spreads).items()
        return [f for r, f in every if r.limit == 24 and not r.drift and not r.ended]

    def launches(truth: str) -> float:
        return float(np.mean([o.launches for found in plain(truth, "13") for o in found]))

    machines = [false(found) for row, found in kinds.items() if row.spread in MACHINES]
    five = [o for found in plain("5", "1") for o in found if o.saved is not None]
    errors = [o.stated - o.saved for o in five if o.saved is not None]
    sure = [o for r, f in kinds.items() if r.truth in ("10", "30", "73") for o in f]
    sure = [o for o in sure if o.saved is not None and o.saved > 0]
    held = [o.low <= o.saved <= o.high for o in sure if o.saved is not None]
    figures = [
        Figure("false_recommendations_flat", max(map(false, of("flat").values())), "ratio"),
        Figure("recommended_10_percent", min(map(share, plain("10", "13"))), "ratio"),
        Figure("recommended_5_percent", min(map(share, plain("5", "1"))), "ratio"),
        Figure("recommended_73_percent", min(map(share, of("73").values())), "ratio"),
        Figure("fresh_launches_30_percent", launches("30"), "count"),
        Figure("fresh_launches_10_percent", launches("10"), "count"),
        Figure(
            "saving_bias_5_percent",
            float(np.mean(errors) / np.mean([(o.high - o.low) / 2 for o in five])),
            "ratio",
        ),
        Figure("saving_coverage", float(np.mean(held)), "ratio"),
    ]
    if machines:
        figures.append(Figure("false_recommendations_machines", max(machines), "ratio"))
    return figures


def main() -> None:
    parser = arguments(__doc__, "verdicts")
    parser.add_argument("--trials", type=int, default=400, help="searches a row")
    parser.add_argument("--first", type=int, default=100_000, help="first seed")
    parser.add_argument("--quick", action="store_true", help="only the rows that the aims name")
    options = parser.parse_args()
    kinds, found = rows(options.quick), {}
    for row, outcomes in zip(kinds, measured(kinds, options.trials, options.first), strict=True):
        found[row] = outcomes
        told(row, outcomes)
    publish(figures_of(found), options.json)


if __name__ == "__main__":
    main()
