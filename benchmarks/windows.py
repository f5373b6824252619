"""Windows as long as their decision needs: joules to the same front, and whether intervals hold.

Whole searches run on problems whose truth is known to the benchmark alone: made-up ones
(`benchmarks.noisy_cluster`), predicted ones, and the groups of recorded tables that are named.
Every window is measured by the conductor of real probes, on scripted ranks and a scripted meter
with simulated time, so its error depends on its length: steps and power scatter as on a machine
that others use, and launches differ. The same searches run with windows that end early (at
`WindowPolicy.search_se`, or once they are shown to be beaten) and with windows that do not.

- `windows_energy_ratio`: joules until the reported front is as good, with early ends over without
  (geometric mean over the searches). As good: it misses no more of the true front's hypervolume
  than the worse of the two final fronts, or than 2 %.
- `windows_energy_ratio_long_launch`: the same where a launch takes 30 s, as on a GPU node.
- `windows_probe_seconds_ratio`: seconds of all probes of a search of as many probes.
- `windows_coverage`: share of the 90 % intervals of step time and energy, of all points, that hold
  the truth; `windows_coverage_early`: of the points whose every window ended early.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import optuna

from benchmarks.figures import Figure, arguments, publish
from benchmarks.noisy_cluster import METER, Truth, correlated, draws, made_up_truth, recorded_truths
from tuner.executors.local import SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel
from tuner.pareto import hypervolume, reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.results.parts import Point
from tuner.results.posterior import Posterior
from tuner.results.state import points_of
from tuner.results.windows import Windows
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.study.callbacks import Progress
from tuner.study.request import StudyRequest
from tuner.study.session import Session
from tuner.testing.scripted_ranks import ScriptedClock, ScriptedRanks
from tuner.testing.studies import problem_of_job
from tuner.workload.measure.measurement import measurement, reached
from tuner.workload.measure.window import Conductor
from tuner.workload.meters.base import PowerSample, Reading
from tuner.workload.probe import Failure, Measurement, ProbeRecord, ProbeRequest, WindowPolicy
from tuner.workload.runners import Runner

#: Share of the true front's hypervolume that a front may always miss.
GOOD_ENOUGH = 0.02
#: Probes of a search, those that measure the front again and verify the choice included.
PROBES = 24
#: Median step of a problem, seconds: a window of 15 s then has some 60 steps.
STEP_S = 0.25
#: Problems whose truth the analytic models predict: (job, cluster).
PREDICTED = (("opt-350m", "a100-8"), ("tiny-gpt", "h200-8"), ("qwen2.5-7b", "h200-8"))
#: Period of the power timeline, seconds, as in real probes.
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Scatter:
    """Errors of measurements on a machine that others use, as standard deviations of logarithms.

    Attributes:
        step: one step's time.
        power: one sample's power.
        correlation: lag-1 autocorrelation of both.
        launch: effect of a launch on time, and another on power.
        launch_s: seconds of a launch.
    """

    step: float = 0.15
    power: float = 0.08
    correlation: float = 0.4
    launch: float = 0.01
    launch_s: float = 2.4


#: Kinds of machines: what their figure's name ends with.
KINDS = (("", Scatter()), ("_long_launch", Scatter(launch_s=30.0)))


class _Meter:
    """Meter whose power is constant between the samples of its timeline."""

    def __init__(self, clock: ScriptedClock, power_W: np.ndarray) -> None:
        self.info, self.resolution_s = METER, 0.0
        self._clock, self._start_s, self._power_W = clock, clock(), power_W
        self._energy_J = np.concatenate([[0.0], np.cumsum(power_W) * SAMPLE_S])

    def read(self) -> Reading:
        now_s = self._clock()
        place = (now_s - self._start_s) / SAMPLE_S
        return Reading(now_s, float(np.interp(place, range(len(self._energy_J)), self._energy_J)))

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        return self.samples()[-1]

    def samples(self) -> tuple[PowerSample, ...]:
        count = min(int((self._clock() - self._start_s) / SAMPLE_S) + 1, len(self._power_W))
        return tuple(
            PowerSample(self._start_s + (k + 0.5) * SAMPLE_S, float(self._power_W[k]))
            for k in range(count)
        )

    def close(self) -> None:
        """Do nothing."""


class WindowRunner(Runner):
    """Runner whose windows are measured by the conductor of real probes, on simulated time.

    Args:
        truth: true figures.
        scatter: errors of the measurements.
        early: whether windows may end early.
        seed: of the draws.
    """

    def __init__(self, truth: Truth, scatter: Scatter, *, early: bool, seed: int) -> None:
        self.meter = METER
        self._truth, self._scatter, self._early, self._seed = truth, scatter, early, seed

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Measure the settings in turn."""
        scatter = self._scatter
        launch = scatter.launch * draws(self._seed, request.probe_id).standard_normal(2)
        windows: list[Measurement] = []
        now_s = scatter.launch_s
        first_W = self._truth.figures[request.configurations()[0]][1]
        energy_J = scatter.launch_s * 0.7 * first_W
        for number, configuration in enumerate(request.configurations()):
            seconds, watts = self._truth.figures[configuration]
            settle_s = request.window.settle_s if configuration.live else 0.0
            found = self._window(
                request,
                configuration,
                (seconds * math.exp(launch[0]), watts * math.exp(launch[1])),
                draws(self._seed, request.probe_id, number),
                windows,
            )
            windows.append(found)
            now_s += settle_s + found.window_s
            energy_J += settle_s * watts + found.energy_J
        return ProbeRecord(
            request,
            tuple(windows),
            METER,
            launch_s=scatter.launch_s,
            wall_s=now_s,
            energy_J=energy_J,
            host="noisy",
        )

    def _window(
        self,
        request: ProbeRequest,
        configuration: Configuration,
        figures: tuple[float, float],
        rng: np.random.Generator,
        before: Sequence[Measurement],
    ) -> Measurement:
        seconds, watts = figures
        scatter, policy = self._scatter, request.window
        count = math.ceil(2 * policy.max_s / seconds) + policy.min_steps + 2
        steps = seconds * np.exp(scatter.step * correlated(rng, count, scatter.correlation))
        longest_s = float(steps.sum())
        samples = math.ceil(longest_s / SAMPLE_S) + 1
        power_W = watts * np.exp(scatter.power * correlated(rng, samples, scatter.correlation))
        # So that the truth is the mean, not the median.
        steps *= math.exp(-(scatter.step**2) / 2)
        power_W *= math.exp(-(scatter.power**2) / 2)
        clock = ScriptedClock()
        ranks = ScriptedRanks(clock, lambda n: float(steps[min(n, count) - 1]), size=1)
        conductor = Conductor(
            ranks,  # type: ignore[arg-type]
            deadline_s=math.inf,
            explain_exit=lambda rank, code: Failure("crash", f"{rank} {code}"),
            clock=clock,
        )
        conductor.first_step()
        meter = _Meter(clock, power_W)
        known = (*request.front, *map(reached, before)) if self._early and request.front else ()
        window = conductor.measure(meter, policy, seconds, samples=meter.samples, known=known)
        found = measurement(configuration.live, window, policy)
        assert isinstance(found, Measurement)
        return found

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Search:
    """Course and answer of one search.

    Attributes:
        curve: (joules, share of the hypervolume that the reported front misses) after each probe.
        seconds: of all probes.
        held: whether each interval of step time and energy holds the truth.
        held_early: the same of the points whose every window ended early.
        early: windows that ended early, and all.
    """

    curve: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    held: list[bool] = field(default_factory=list)
    held_early: list[bool] = field(default_factory=list)
    early: tuple[int, int] = (0, 0)

    def joules_to(self, missing: float) -> float:
        """Return the joules after which the front stays at least this good."""
        last = 0.0
        for joules, share in reversed(self.curve):
            if share > missing:
                break
            last = joules
        return last


def predicted_truth(job_name: str, cluster_name: str) -> Truth:
    """Return what the analytic models predict of a job's default space; the baseline first."""
    problem = problem_of_job(job_name, cluster_name, "default", plan=True)
    assert problem.job is not None
    assert problem.baseline is not None
    every = list(dict.fromkeys([problem.baseline, *problem.candidates.configurations]))
    predicted = AnalyticModel(problem.job, load_cluster(cluster_name)).predict(every)
    figures = zip(predicted.step_time_s, predicted.power_W, strict=True)
    pairs = ((float(time_s), float(power_W)) for time_s, power_W in figures)
    return Truth(f"{job_name} on {cluster_name}", dict(zip(every, pairs, strict=True)))


def _at_usual_pace(truth: Truth) -> Truth:
    """Return the problem with times scaled so that the median step takes `STEP_S`."""
    median_s = float(np.median([time_s for time_s, _ in truth.figures.values()]))
    scaled = {c: (t * STEP_S / median_s, power) for c, (t, power) in truth.figures.items()}
    return replace(truth, figures=scaled)


def _logs(truth: Truth, configurations: Sequence[Configuration]) -> np.ndarray:
    figures = np.array([truth.figures[c] for c in configurations])
    time, power = np.log(figures).T
    return np.column_stack([time + power, time])


def search(
    truth: Truth, scatter: Scatter, *, early: bool, seed: int, probes: int = PROBES
) -> Search:
    """Search one problem and compare the course with the truth."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    every = _logs(truth, list(truth.figures))
    reference = reference_point(every)
    whole = hypervolume(every, reference)
    found = Search()
    records: list[ProbeRecord] = []

    def look(event: Progress) -> None:
        if event.record is None:
            return
        records.append(event.record)
        front = _logs(truth, [point.configuration for point in event.front])
        share = 1 - hypervolume(front, reference) / whole
        found.curve.append((sum(record.energy_J for record in records), share))

    problem = replace(
        truth.problem(),
        cost=ProbeCost(launch_s=scatter.launch_s, launch_power=0.7, window_s=5.0, min_steps=3),
    )
    runner = WindowRunner(truth, scatter, early=early, seed=seed)
    window = WindowPolicy()
    window = window if early else replace(window, search_se=window.target_se)
    settings = SearchSettings(max_probes=probes, max_regret=0.0, seed=seed, window=window)
    with tempfile.TemporaryDirectory() as folder:
        Session(
            problem,
            lambda run, say: SimulatedExecutor(runner),
            StudyRequest(search=settings),
            run=RunFolder.named(folder, "search"),
            notify=look,
        ).run()
    found.seconds = sum(record.wall_s for record in records)
    _judge(truth, records, found)
    return found


def _judge(truth: Truth, records: Sequence[ProbeRecord], found: Search) -> None:
    """Compare the intervals of the points with the truth."""
    ended = [
        (Configuration(record.request.launch, m.live), _ended_early(m))
        for record in records
        for m in record.measurements
    ]
    long = {configuration for configuration, early in ended if not early}
    found.early = (sum(early for _, early in ended), len(ended))
    for point in points_of(Posterior.of(Windows.of(records)), 1):
        held = list(_held(truth, point))
        found.held += held
        if point.configuration not in long:
            found.held_early += held


def _ended_early(m: Measurement) -> bool:
    return any(flag.startswith("ended after") for flag in m.flags)


def _held(truth: Truth, point: Point) -> Iterator[bool]:
    seconds, watts = truth.figures[point.configuration]
    low, high = point.time_interval_s
    yield low <= seconds <= high
    low, high = point.energy_interval_kJ
    yield low <= seconds * watts / 1000 <= high


def _pair(case: tuple[Truth, Scatter, int, int]) -> tuple[Search, Search]:
    truth, scatter, seed, probes = case
    with_ends, without = (
        search(truth, scatter, early=early, seed=seed, probes=probes) for early in (True, False)
    )
    return with_ends, without


def energy_ratio(pairs: Sequence[tuple[Search, Search]]) -> float:
    """Return the joules to the same front, with early ends over without: the geometric mean."""
    logs = []
    for with_ends, without in pairs:
        missing = max(with_ends.curve[-1][1], without.curve[-1][1], GOOD_ENOUGH)
        logs.append(math.log(with_ends.joules_to(missing) / without.joules_to(missing)))
    return math.exp(float(np.mean(logs)))


def main() -> None:
    parser = arguments("windows that end early")
    parser.add_argument("tables", nargs="*", type=Path, help="folders of recorded tables")
    parser.add_argument("--problems", type=int, default=12, help="made-up problems (default: 12)")
    parser.add_argument(
        "--predicted", type=int, default=len(PREDICTED), help="predicted problems (default: all)"
    )
    parser.add_argument("--groups", type=int, default=4, help="groups of each table (default: 4)")
    parser.add_argument("--seeds", type=int, default=2, help="searches of each (default: 2)")
    parser.add_argument("--probes", type=int, default=PROBES, help=f"(default: {PROBES})")
    parser.add_argument("--quick", action="store_true", help="short launches alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    truths = [made_up_truth(seed) for seed in range(options.problems)]
    truths += [predicted_truth(job, cluster) for job, cluster in PREDICTED[: options.predicted]]
    for folder in options.tables:
        truths += list(recorded_truths(folder))[: options.groups]
    truths = [_at_usual_pace(truth) for truth in truths]
    seeds = range(options.seeds)
    figures = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, scatter in KINDS[: 1 if options.quick else 2]:
            cases = [(truth, scatter, seed, options.probes) for truth in truths for seed in seeds]
            pairs = []
            for case, pair in zip(cases, pool.map(_pair, cases), strict=True):
                pairs.append(pair)
                print(f"{case[0].name}: {energy_ratio([pair]):.3f} of the joules", flush=True)
            ratio = energy_ratio(pairs)
            figures.append(Figure(f"windows_energy_ratio{name}", ratio, "ratio"))
            if name:
                continue
            ended, windows = np.sum([with_ends.early for with_ends, _ in pairs], axis=0)
            print(f"{len(pairs)} searches: {ended} of {windows} windows ended early")
            seconds = np.sum([[a.seconds, b.seconds] for a, b in pairs], axis=0)
            final = np.mean([[a.curve[-1][1], b.curve[-1][1]] for a, b in pairs], axis=0)
            print(f"missing at the end: {final[0]:.4f} with early ends, {final[1]:.4f} without")
            held = [h for with_ends, _ in pairs for h in with_ends.held]
            short = [h for with_ends, _ in pairs for h in with_ends.held_early]
            plain = [h for _, without in pairs for h in without.held]
            print(f"intervals that hold without early ends: {np.mean(plain):.3f}")
            figures += [
                Figure("windows_probe_seconds_ratio", float(seconds[0] / seconds[1]), "ratio"),
                Figure("windows_coverage", float(np.mean(held)), "ratio"),
                Figure("windows_coverage_early", float(np.mean(short)), "ratio"),
            ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
