"""Coverage of the answers of whole searches: intervals, probabilities, confirmations, savings.

Whole studies (adaptive search, further launches, answer) run on problems whose truth is
known to the benchmark alone: made-up ones and the groups of recorded tables (`benchmarks.
noisy_cluster`), with launches that differ by 0 to 5 %, drift and correlated windows. The answer is
then compared with the truth.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from benchmarks.noisy_cluster import (
    Noise,
    NoisyRunner,
    Truth,
    flat_truth,
    made_up_truth,
    recorded_truths,
)
from benchmarks.verdicts import exact_error
from tuner.answer.answer import Answer
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.pareto import nondominated
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration
from tuner.study.request import StudyRequest
from tuner.study.session import Session

#: Standard deviations of the launches' effects.
LAUNCH_SD = (0.0, 0.01, 0.02, 0.05)
#: Probabilities that count for `coverage_front_probability`.
BAND = (0.85, 0.95)
#: Probes of a study.
PROBES = 24


@dataclass
class Outcome:
    """Comparison of one study's answer, or of several, with the truth.

    Attributes:
        energy, time: whether each measured point's interval holds the truth.
        stated, on_front: probability of each point to be on the front, and whether it is.
        savings: (error, half-width of the interval) of a recommended saving, in logarithms.
        point_savings: the same of the points of the choice and the baseline.
        confirmed: whether it recommends to train with another configuration than the baseline.
        truly_better: whether that configuration is better than the baseline in energy or in time.
    """

    energy: list[bool] = field(default_factory=list)
    time: list[bool] = field(default_factory=list)
    stated: list[float] = field(default_factory=list)
    on_front: list[bool] = field(default_factory=list)
    savings: list[tuple[float, float]] = field(default_factory=list)
    point_savings: list[tuple[float, float]] = field(default_factory=list)
    confirmed: list[bool] = field(default_factory=list)
    truly_better: list[bool] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        for name, values in vars(other).items():
            getattr(self, name).extend(values)


def study(truth: Truth, noise: Noise, *, seed: int, probes: int = PROBES) -> Answer:
    """Run one study of this truth and return its answer."""
    executor = SimulatedExecutor(NoisyRunner(truth, noise, seed=seed))
    with tempfile.TemporaryDirectory() as folder:
        return Session(
            truth.problem(),
            lambda announce: executor,
            StudyRequest(search=SearchSettings(max_probes=probes, seed=seed)),
            run=RunFolder.named(folder, "study"),
        ).run()


def _true(truth: Truth, configuration: Configuration) -> tuple[float, float]:
    """Return log energy and log time of a step."""
    seconds, watts = truth.figures[configuration]
    return math.log(seconds * watts), math.log(seconds)


def judge(truth: Truth, result: Answer) -> Outcome:
    """Compare an answer with the truth."""
    figures = np.array([_true(truth, configuration) for configuration in truth.figures])
    front = dict(zip(truth.figures, nondominated(*figures.T), strict=True))
    found = Outcome()
    for point in result.points:
        energy, time = _true(truth, point.configuration)
        low, high = point.inferred.energy_interval_kJ
        found.energy.append(low <= math.exp(energy) / 1000 <= high)
        low, high = point.inferred.time_interval_s
        found.time.append(low <= math.exp(time) <= high)
    for point in (*result.points, *result.predicted):
        found.stated.append(point.p_nondominated)
        found.on_front.append(bool(front[point.configuration]))
    best, baseline, advice = result.best, result.baseline, result.recommendation
    assert best is not None
    assert baseline is not None
    today = _true(truth, baseline.configuration)
    better = _true(truth, best.configuration)
    saved = today[0] - better[0]
    by_intervals = replace(result.judged, posterior=None, ratio_sd=None).differences(best)
    if by_intervals is not None:
        between = by_intervals[0]
        found.point_savings.append(_error(between.relative, between.low, between.high, saved))
        if advice is not None and advice.energy is not None:
            stated = advice.energy
            if advice.point.configuration == best.configuration and math.isfinite(stated.high):
                error = _error(stated.relative, stated.low, stated.high, saved)
                found.savings.append(error)
    trained = advice is not None and advice.action == "train"
    found.confirmed.append(trained)
    if trained:
        point = _true(truth, advice.point.configuration)
        found.truly_better.append(any(b < a for a, b in zip(today, point, strict=True)))
    return found


def _error(relative: float, low: float, high: float, saved: float) -> tuple[float, float]:
    """Return the error of a stated saving and its interval's half-width, in logarithms."""
    half = (math.log1p(high) - math.log1p(max(low, -1 + 1e-9))) / 2
    return -math.log1p(relative) - saved, half


def _judged(case: tuple[Truth, Noise, int]) -> Outcome:
    truth, noise, seed = case
    return judge(truth, study(truth, noise, seed=seed))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    error, half = np.mean(np.array(pairs), axis=0)
    return float(error / half)


def _calibration(found: Outcome) -> list[str]:
    stated, truth = np.array(found.stated), np.array(found.on_front)
    lines = ["said to be on the front | points | mean said | truly on it"]
    for low, high in ((0, 0.05), (0.05, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.85), BAND, (0.95, 2)):
        rows = (stated >= low) & (stated < high)
        if rows.any():
            said, true = stated[rows].mean(), truth[rows].mean()
            lines.append(
                f"{low:.2f} to {min(high, 1):.2f} | {rows.sum()} | {said:.3f} | {true:.3f}"
            )
    return lines


def figures_of(found: Outcome, flat: Outcome) -> list[Figure]:
    """Return the figures of the studies with differences and of those without any."""
    stated, truth = np.array(found.stated), np.array(found.on_front)
    rows = (stated >= BAND[0]) & (stated < BAND[1])
    values = {
        "coverage_energy": float(np.mean(found.energy)),
        "coverage_time": float(np.mean(found.time)),
        "coverage_front_probability": float(truth[rows].mean()) if rows.any() else math.nan,
        "saving_bias": _ratio(found.savings) if found.savings else math.nan,
        "saving_bias_points": _ratio(found.point_savings) if found.point_savings else math.nan,
        "false_confirmations_whole_searches": float(np.mean(flat.confirmed)),
    }
    return [Figure(name, value, "ratio") for name, value in values.items()]


def main() -> None:
    parser = arguments(__doc__, "coverage")
    parser.add_argument("tables", nargs="*", type=Path, help="folders of recorded tables")
    parser.add_argument("--studies", type=int, default=30, help="studies at each launch effect")
    parser.add_argument("--flat", type=int, default=20, help="flat ones at each launch effect")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a few studies, for a test")
    options = parser.parse_args()
    studies, flat = (1, 1) if options.quick else (options.studies, options.flat)
    truths = [made_up_truth(seed) for seed in range(studies)]
    truths += [truth for folder in options.tables for truth in recorded_truths(folder)]
    every, nothing = Outcome(), Outcome()
    with ProcessPoolExecutor(options.jobs) as pool:
        for number, spread in enumerate(LAUNCH_SD):
            noise = Noise(spread)
            cases = [(truth, noise, 1000 * number + i) for i, truth in enumerate(truths)]
            here = Outcome()
            for outcome in pool.map(_judged, cases):
                here.add(outcome)
            every.add(here)
            for outcome in pool.map(_judged, [(flat_truth(), noise, i) for i in range(flat)]):
                nothing.add(outcome)
            wrong = len(here.truly_better) - sum(here.truly_better)
            energy, time = 100 * np.mean(here.energy), 100 * np.mean(here.time)
            print(
                f"launches that differ by {100 * spread:g} %: 90 % intervals hold the energy of "
                f"{energy:.1f} % and the time of {time:.1f} % of {len(here.time)} points; "
                f"{sum(here.confirmed)} of {len(cases)} changes recommended, {wrong} wrongly",
                flush=True,
            )
    print("\n".join(_calibration(every)))
    publish([*figures_of(every, nothing), exact_error(max(2, studies))], options.json)


if __name__ == "__main__":
    main()
