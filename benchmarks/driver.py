"""The driver's own time per probe: plan, record and update the study, without any training.

A study of a real job over 10,000 valid configurations runs through the driver's own loop, trace and
journal; only the training is replaced, by the analytic model with random errors, which answers at
once. The clock runs while the driver, not the runner, is working. Each size of study (10, 100,
1,000 measurements) is an existing trace that is continued: the first probe is cold (the surrogates
are refitted and every candidate is predicted, as whenever the data have grown by a fifth); the
later ones are warm. Target: 0.5 s per probe at 1,000 measurements.

`driver_cpu_s_8_probes` is the processor's time of a whole `optimize` of eight probes, planning,
recording and the answer included and imports left out: the median of searches with seeds of their
own. Another program's load does not lengthen it, as it does seconds. Target: 1.5 s.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
import zlib
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import tuner
from benchmarks.figures import Figure, arguments, publish
from tuner.executors.local import InlineExecutor, SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel
from tuner.problem.constraints import Constraints
from tuner.problem.problem import Problem
from tuner.problem.settings import SearchSettings
from tuner.problem.study_spec import StudySpec
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import Candidates, load_space
from tuner.storage import open_storage
from tuner.study.loop import SearchLoop
from tuner.study.recorder import StudyRecorder
from tuner.testing.studies import LONG_JOB, ModelRunner, problem_of_job
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.runners import Runner
from tuner.workload.trace import TraceWriter, read_trace

#: What is tuned: every kind of knob varies, so a row of features is as wide as it gets.
JOB, CLUSTER, SPACE = "opt-350m", "h100-32", "full"
#: Live settings a probe of the history visits.
HISTORY_LIVE = 4


class BentModel(Runner):
    """A runner that answers at once: the analytic model, bent by launch, with a window's noise."""

    meter = MeterInfo("simulated", "gpu", "the analytic model, bent by launch")

    def __init__(self, problem: Problem, seed: int) -> None:
        assert problem.job is not None
        assert problem.cluster is not None
        self._model = AnalyticModel(problem.job, problem.cluster)
        self._rng = np.random.default_rng(seed)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        configurations = request.configurations()
        said = self._model.predict(configurations)
        code = zlib.crc32(request.launch.key.encode())
        bend_t, bend_p = 1 + 0.3 * (code % 101) / 100, 1 + 0.1 * (code % 103) / 102
        windows = []
        for live, time_s, power_W in zip(request.live, said.step_time_s, said.power_W, strict=True):
            step_s = float(time_s) * bend_t * float(np.exp(self._rng.normal(0, 0.002)))
            watts = float(power_W) * bend_p * float(np.exp(self._rng.normal(0, 0.015)))
            windows.append(
                Measurement(
                    live=live,
                    steps=10,
                    window_s=10 * step_s,
                    step_time_s=step_s,
                    step_time_se_s=0.001 * step_s,
                    energy_J=10 * step_s * watts,
                    power_W=watts,
                )
            )
        spent_J = 15.0 * windows[0].power_W + sum(window.energy_J for window in windows)
        return ProbeRecord(
            request, tuple(windows), self.meter, launch_s=15.0, wall_s=30.0, energy_J=spent_J
        )

    def close(self) -> None:
        """Nothing to close."""


class TimedExecutor(InlineExecutor):
    """An inline executor that notes how long the driver worked between two probes' runs."""

    def __init__(self, runner: BentModel) -> None:
        super().__init__(runner)
        self.driver_s: list[float] = []
        self.cpu_s: list[float] = []
        self._start()

    def _start(self) -> None:
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        self.driver_s.append(time.perf_counter() - self._since)
        self.cpu_s.append(time.process_time() - self._cpu_since)
        record = super().wait(timeout_s)
        self._start()
        return record


class TimedPlanner(CandidatePlanner):
    """The planner, noting how long each plan (fit included) took."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.candidates, prior=problem.prior)
        self.plan_s: list[float] = []

    def plan(self, state: PlanningState) -> ProbePlan | None:
        began = time.perf_counter()
        plan = super().plan(state)
        self.plan_s.append(time.perf_counter() - began)
        return plan


@dataclass
class Timed:
    """Seconds of one session; a figure a probe, the first one cold.

    Attributes:
        told_s: opening the study and telling it the whole trace, candidates' features included.
        driver_s: the driver's own work of each probe.
        cpu_s: the processor's seconds in it, which another program's load does not lengthen.
        plan_s: the planning in it, fit included.
    """

    told_s: float
    driver_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)


def problem_of_size(count: int, seed: int) -> Problem:
    """The job's problem with about `count` of its valid configurations, whole launches drawn."""
    problem = problem_of_job(JOB, CLUSTER, "default")
    every = load_space(SPACE).candidates(load_job(JOB), load_cluster(CLUSTER))
    rng = np.random.default_rng(seed)
    chosen: list[Configuration] = []
    for place in rng.permutation(len(every.launches)):
        rows = every.indices_of_launch(every.launches[place])
        if len(chosen) + len(rows) > count:
            break
        chosen += [every[row] for row in rows]
    return dataclasses.replace(
        problem, candidates=Candidates.from_configurations(chosen), baseline=None
    )


def history(problem: Problem, runner: BentModel, measurements: int, writer: TraceWriter) -> None:
    """Probes of launches drawn at random, until there are so many measurements."""
    rng = np.random.default_rng(measurements)
    made = 0
    for number, place in enumerate(rng.permutation(len(problem.candidates.launches))):
        lives = problem.candidates.lives[place]
        count = min(HISTORY_LIVE, len(lives), measurements - made)
        visited = tuple(lives[i] for i in rng.permutation(len(lives))[:count])
        launch = problem.candidates.launches[place]
        writer.append(runner.run(ProbeRequest(f"p{number:04d}", launch, visited)))
        made += count
        if made == measurements:
            return


def session(problem: Problem, folder: Path, measurements: int, probes: int) -> Timed:
    """Resume a study of so many measurements and let it make some probes more."""
    runner = BentModel(problem, seed=measurements)
    with closing(TraceWriter(folder / "trace" / "probes.jsonl")) as writer:
        history(problem, runner, measurements, writer)
        records = list(read_trace(writer.path).records)
        storage = open_storage(None, folder / "study.journal")
        began = time.perf_counter()
        planner = TimedPlanner(problem)
        recorder = StudyRecorder(
            name="driver",
            storage=storage,
            candidates=problem.candidates,
            steps=problem.steps,
            constraints=Constraints(),
        )
        recorder.catch_up(records)
        told_s = time.perf_counter() - began
        executor = TimedExecutor(runner)
        settings = SearchSettings(max_probes=len(records) + probes, verify=False)
        spec = StudySpec("driver", folder, problem, settings=settings)
        search = SearchLoop(
            spec=spec,
            executor=executor,
            planner_of=lambda _: planner,
            recorder=recorder,
            records=records,
            trace=writer,
            first_number=len(records),
        )
        search.run()
    return Timed(told_s, executor.driver_s, executor.cpu_s, planner.plan_s)


def cpu_s_of_search(seed: int, probes: int = 8) -> float:
    """Return the processor's seconds of a search whose probes a model answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        result = tuner.optimize(
            LONG_JOB,
            cluster="cpu-2",
            executor=SimulatedExecutor(ModelRunner()),
            search=SearchSettings(seed=seed, max_probes=probes),
            runs_dir=folder,
            report=False,
            progress=False,
        )
        spent_s = time.process_time() - began
        made = len(read_trace(Path(result.run_dir) / "trace" / "probes.jsonl").records)
    if made != probes:
        raise RuntimeError(f"the search made {made} probes instead of {probes}")
    return spent_s


def main() -> None:
    parser = arguments("the driver's own time a probe")
    parser.add_argument("--searches", type=int, default=5, help="searches of eight probes")
    parser.add_argument("--probes", type=int, default=12, help="probes of each session")
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    cpu_s_of_search(seed=0, probes=2)  # imports, and tables that are read once
    searches_s = [cpu_s_of_search(seed) for seed in range(options.searches)]
    print(f"CPU seconds of searches of eight probes: {' '.join(f'{s:.2f}' for s in searches_s)}")
    problem = problem_of_size(options.candidates, seed=0)
    print(
        f"{JOB} on {CLUSTER}, space {SPACE}: {len(problem.candidates)} configurations, "
        f"{len(problem.candidates.launches)} launches"
    )
    print("measured  told all s  cold probe s (plan)  warm median s (plan)  worst s")
    figures = [Figure("driver_cpu_s_8_probes", statistics.median(searches_s), "s")]
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            timed = session(problem, Path(folder), size, options.probes)
        cold, warm = timed.driver_s[0], timed.driver_s[1:]
        plan = statistics.median(timed.plan_s[1:])
        print(
            f"{size:8}  {timed.told_s:10.2f}  {cold:9.3f} ({timed.plan_s[0]:.3f})"
            f"     {statistics.median(warm):9.3f} ({plan:.3f})       {max(warm):.3f}",
            flush=True,
        )
        figures += [
            Figure(f"driver_probe_at_{size}_s", statistics.median(warm), "s"),
            Figure(f"driver_probe_worst_at_{size}_s", max(warm), "s"),
            Figure(f"driver_cold_probe_at_{size}_s", cold, "s"),
            Figure(f"driver_probe_cpu_at_{size}_s", statistics.median(timed.cpu_s[1:]), "s"),
            Figure(f"driver_cold_probe_cpu_at_{size}_s", timed.cpu_s[0], "s"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
