"""Tuning while training, replayed on recorded live settings: `python -m benchmarks.online`.

Each problem is trained for 10,000 steps under noise, steadily and with injected drift, by
`tuner.online`, at the fixed highest setting, at the best fixed setting that keeps the promise (the
oracle, which knows the truth), and by peers. Figures are medians over problems of the means over
seeds, for held-out problems unless their names say otherwise. Events of demand response are
replayed on all problems that can draw so little (`benchmarks.online.events`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.online.events import event_figures
from benchmarks.online.peers import EpsilonGreedy, Ucb, ZeusSweep
from benchmarks.online.tables import Problem, problems
from benchmarks.online.training import BEGINS, DRIFTS, STEPS, Drift, Fixed, Policy, Run, Training
from tuner.online.bandit import OnlineTuner
from tuner.online.windows import Chunk

PEERS: dict[str, Callable[[int, float, int], Policy]] = {
    "zeus": lambda settings, slowdown, seed: ZeusSweep(settings, slowdown),
    "ucb": lambda settings, slowdown, seed: Ucb(settings, slowdown),
    "epsilon_greedy": EpsilonGreedy,
}


class Online:
    """The tuner as a policy."""

    def __init__(self, problem: Problem, max_slowdown: float) -> None:
        self.tuner = OnlineTuner(problem.x, max_slowdown=max_slowdown, window_s=10.0, settle_s=2.0)
        self.learning_J: dict[int, float] = {}

    def add(self, steps: int, seconds: float, energy_J: float) -> int:
        if self.tuner.decision.reason != "choice":
            at = self.tuner.decision.setting
            self.learning_J[at] = self.learning_J.get(at, 0.0) + energy_J
        return self.tuner.add(Chunk(steps, seconds, energy_J)).setting


@dataclass
class Result:
    """Runs of one problem, steady or with drift; energies over the oracle's or the highest's."""

    problem: Problem
    energy: dict[str, list[float]] = field(default_factory=dict)
    broken: dict[str, list[bool]] = field(default_factory=dict)
    noticed: list[float] = field(default_factory=list)
    missed: int = 0
    false_alarms: list[int] = field(default_factory=list)
    exploring: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)

    def mean(self, policy: str) -> float:
        """Mean energy of a policy over the oracle's."""
        return statistics.fmean(self.energy[policy])

    def share_broken(self, policy: str) -> float:
        """Share of runs that took longer than promised."""
        return statistics.fmean(self.broken[policy])

    @property
    def over_best_peer(self) -> float:
        """Energy over the best peer's that kept the promise in 95 % of its runs.

        Where none did, the fixed highest setting takes its place.
        """
        kept = [name for name in PEERS if self.share_broken(name) <= 0.05]
        return self.mean("online") / min(self.mean(name) for name in [*kept, "highest"])


def result_of(problem: Problem, drifts: Sequence[Drift], seeds: int, slowdown: float) -> Result:
    result = Result(problem)
    for seed in range(seeds):
        drift = drifts[seed % len(drifts)]
        training = Training(problem, drift, seed)
        fixed = [training.run(lambda at=i: Fixed(at)) for i in range(len(problem.x))]  # type: ignore[misc]
        limit_s = (1 + slowdown) * fixed[0].seconds
        oracle_J = min(run.energy_J for run in fixed if run.seconds <= limit_s)
        online = Online(problem, slowdown)
        runs: dict[str, Run] = {"highest": fixed[0], "online": training.run(lambda: online)}  # noqa: B023
        for name, make in PEERS.items():
            runs[name] = training.run(lambda: make(len(problem.x), slowdown, seed))  # noqa: B023
        for name, run in runs.items():
            result.energy.setdefault(name, []).append(run.energy_J / oracle_J)
            result.broken.setdefault(name, []).append(run.seconds > limit_s)
        _judge(result, online, drift, runs["online"], fixed)
    return result


def _judge(result: Result, online: Online, drift: Drift, run: Run, fixed: Sequence[Run]) -> None:
    """Add what the tuner noticed and claimed, against the truth."""
    begins = BEGINS.get(drift, STEPS + 1)
    steps = [change.step for change in online.tuner.changes]
    after = [step for step in steps if step >= begins]
    result.false_alarms.append(sum(step < begins for step in steps))
    if drift and after:
        result.noticed.append(after[0] - begins)
    result.missed += bool(drift) and not after
    most_used = max(range(len(fixed)), key=lambda i: run.used[i])
    beyond_J = sum(
        max(0.0, energy_J * (1 - fixed[most_used].energy_J / fixed[at].energy_J))
        for at, energy_J in online.learning_J.items()
    )
    result.exploring.append(beyond_J / run.energy_J)
    low, _, high = online.tuner.balance.slowdown
    result.covered.append(low <= run.seconds / fixed[0].seconds - 1 <= high)


def _median(results: Sequence[Result], figure: Callable[[Result], float]) -> float:
    return statistics.median(figure(result) for result in results)


def _pooled(results: Sequence[Result], values: Callable[[Result], Sequence[float]]) -> float:
    pooled = [value for result in results for value in values(result)]
    return statistics.fmean(pooled) if pooled else float("nan")


def figures_of(steady: Sequence[Result], drifting: Sequence[Result], suffix: str) -> list[Figure]:
    both = [*steady, *drifting]
    named = {
        "online_over_oracle_steady": (_median(steady, lambda r: r.mean("online")), "ratio"),
        "online_over_oracle_drift": (_median(drifting, lambda r: r.mean("online")), "ratio"),
        "highest_over_oracle_steady": (_median(steady, lambda r: r.mean("highest")), "ratio"),
        "online_over_best_peer": (_median(both, lambda r: r.over_best_peer), "ratio"),
        "promises_broken": (_pooled(both, lambda r: r.broken["online"]), "share"),
        "steps_to_notice": (
            statistics.median([n for r in drifting for n in r.noticed] or [float("nan")]),
            "steps",
        ),
        "drifts_missed": (
            sum(r.missed for r in drifting) / sum(len(r.covered) for r in drifting),
            "share",
        ),
        "false_alarms_per_10k_steps": (_pooled(steady, lambda r: r.false_alarms), "count"),
        "exploring_cost": (_pooled(both, lambda r: r.exploring), "share"),
        "slowdown_in_interval": (_pooled(both, lambda r: r.covered), "share"),
    }
    for name in PEERS:
        named[f"promises_broken_{name}"] = (_pooled(both, lambda r: r.broken[name]), "share")  # noqa: B023
        named[f"{name}_over_oracle"] = (_median(both, lambda r: r.mean(name)), "ratio")  # noqa: B023
    return [Figure(f"{name}{suffix}", value, unit) for name, (value, unit) in named.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "online")
    parser.add_argument("--seeds", type=int, default=6, help="runs of each problem (default: 6)")
    parser.add_argument("--max-slowdown", type=float, default=0.05, help="promise (default: 0.05)")
    parser.add_argument(
        "--traces", type=Path, default=ROOT.parent / "shared" / "traces", metavar="FOLDER"
    )
    parser.add_argument(
        "--events", type=int, default=1000, help="demand-response events (default: 1000)"
    )
    options = parser.parse_args(argv)
    found = problems(options.traces)
    pairs = []
    for problem in found:
        pair = [
            result_of(problem, drifts, options.seeds, options.max_slowdown)
            for drifts in (("",), DRIFTS)
        ]
        pairs.append(pair)
        for kind, result in zip(("steady", "drift"), pair, strict=True):
            told = " ".join(
                f"{name} {result.mean(name):.3f} ({100 * result.share_broken(name):.0f} % broken)"
                for name in ("highest", "online", *PEERS)
            )
            print(f"{problem.split} {problem.name} {kind}: over the oracle: {told}", flush=True)
    figures = []
    for split in ("held_out", "seen", "tuned"):
        chosen = [pair for pair in pairs if pair[0].problem.split == split]
        if chosen:
            suffix = "" if split == "held_out" else f"_{split}"
            figures += figures_of([a for a, _ in chosen], [b for _, b in chosen], suffix)
    figures += event_figures(found, options.events)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
