"""One run of one sampler on one problem, and all runs of a benchmark."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import optuna

from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.samplers import planner_named
from benchmarks.search.start import StartingAt, start_of
from benchmarks.search.truth import WITHIN, truth_of
from tuner.executors.local import SimulatedExecutor
from tuner.models.analytic.model import Prior
from tuner.problem.probe_cost import ProbeCost
from tuner.search.planner import PlanningState
from tuner.search.question import Question
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest
from tuner.workload.records.replay import TableRunner


@dataclass(frozen=True)
class Run:
    """One run of one sampler on one problem.

    Attributes:
        kJ, launches, measurements: until the front was found, or the whole table's.
        found: whether it was.
        matched_kJ: until each point of the front was matched, or the whole table's; NaN if the run
            ended before.
        curve: (kJ, share of the hypervolume missing) after each probe.
        plan_s: the driver's median seconds a plan.
        search_s: how long the search would have taken, seconds on the table's clock.
    """

    sampler: str
    problem: Problem
    seed: int
    kJ: float
    launches: int
    measurements: int
    found: bool
    matched_kJ: float
    curve: tuple[tuple[float, float], ...]
    plan_s: float
    search_s: float


class ProblemSearch:
    """A search of one problem that ends when the truth says so.

    Args:
        problem: what is searched.
        sampler_name: as of `planner_named`.
        seed: of the sampler and of the noise.
        in_flight: number of probes in flight.
        until_matched: continue after the front is found until each of its points is matched.
        prior: the models that ours has; None for those of `sampler_name`.
    """

    def __init__(
        self,
        problem: Problem,
        sampler_name: str,
        seed: int,
        in_flight: int,
        until_matched: bool,
        prior: Prior | None = None,
    ) -> None:
        self.table, self.truth = load_problem(problem), truth_of(problem)
        self.in_flight, self.until_matched = in_flight, until_matched
        runner = TableRunner(self.table, problem.group, seed=seed)
        self.executor = SimulatedExecutor(runner, capacity=in_flight)
        cost = ProbeCost(**asdict(self.table.cost))
        planner = planner_named(
            sampler_name,
            Candidates.from_configurations(self.truth.logs),
            cost,
            seed,
            self.table.predicted_by,
            prior,
        )
        self.planner = StartingAt(planner, start_of(problem, seed))
        self._asked = PlanningState(cost=cost)
        self.records: list[ProbeRecord] = []
        self.flying: dict[str, tuple[Configuration, ...]] = {}
        self.measured: list[Configuration] = []
        self.curve: list[tuple[float, float]] = []
        self.plan_s: list[float] = []
        self.kJ, self.submitted = 0.0, 0
        #: (kJ, launches, measurements) when the front was found, and when it was matched.
        self.found: tuple[float, int, int] | None = None
        self.matched: tuple[float, int, int] | None = None

    def ask(self, question: Question | None) -> None:
        """Set the limits and the objective of the search."""
        self._asked = replace(self._asked, question=question)

    def run(self, most: int) -> None:
        """Search until the end, until `most` points are measured, or until none is left."""
        while True:
            while (
                self.executor.in_flight < self.in_flight
                and not self._ended
                and len(self.measured) < most
            ):
                if self.executor.in_flight and self.planner.better_to_wait(self._state()):
                    break
                if not self._submit():
                    break
            # What is in flight when the front is found was started, and is paid for.
            record = self.executor.wait()
            if record is None:
                return
            self.records.append(record)
            del self.flying[record.request.probe_id]
            self.kJ += record.energy_J / 1000
            self.measured += record.request.configurations()
            self._note_ends(self.measured, self.kJ)
            self.curve.append((self.kJ, self.truth.missing(self.measured)))

    @property
    def _ended(self) -> bool:
        return self.found is not None and (not self.until_matched or self.matched is not None)

    def _state(self, without: str = "") -> PlanningState:
        others = [each for name, each in self.flying.items() if name != without]
        in_flight = tuple(configuration for each in others for configuration in each)
        return replace(self._asked, records=tuple(self.records), in_flight=in_flight)

    def _submit(self) -> bool:
        began = time.perf_counter()
        plan = self.planner.plan(self._state())
        self.plan_s.append(time.perf_counter() - began)
        if plan is None:
            return False
        name = f"p{self.submitted:04d}"
        request = ProbeRequest(name, plan.launch, plan.live, extendable=plan.extendable)
        self.submitted += 1
        self.flying[name] = plan.configurations
        self.executor.submit(request, self._next_settings)
        return True

    def _note_ends(self, measured: Sequence[Configuration], kJ: float) -> None:
        """Note which ends are reached with these measurements, paid with `kJ`."""
        state = (kJ, self.submitted, len(measured))
        if self.found is None and self.truth.missing(measured) <= WITHIN:
            self.found = state
        if self.until_matched and self.matched is None and self.truth.matched(measured):
            self.matched = state

    def _next_settings(
        self, request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        so_far = [Configuration(request.launch, m.live) for m in windows]
        powers = {p.configuration: p.power_W for p in self.truth.points}
        launch_kJ = self.table.cost.energy_J(powers[c] for c in so_far) / 1000
        self._note_ends([*self.measured, *so_far], self.kJ + launch_kJ)
        if self._ended:
            return ()
        began = time.perf_counter()
        record = ProbeRecord(request, tuple(windows), self.executor.meter)
        plan = self.planner.plan_continuation(self._state(request.probe_id), record)
        self.plan_s.append(time.perf_counter() - began)
        more = () if plan is None else plan.configurations
        self.flying[request.probe_id] = (*request.configurations(), *more)
        return tuple(configuration.live for configuration in more)


def run(
    problem: Problem,
    sampler_name: str,
    seed: int,
    in_flight: int = 1,
    most: int = 10**9,
    until_matched: bool = False,
) -> Run:
    """Search one problem until the front is found, `most` points are measured, or none is left.

    Args:
        problem: what is searched.
        sampler_name: one of the benchmark's samplers.
        seed: of the sampler and of the noise.
        in_flight: number of probes in flight.
        most: number of measurements after which a run counts as one that never finds the front.
        until_matched: also search until each point of the front is matched (`Run.matched_kJ`); of
            one probe in flight only, whose cost at either end is known.
    """
    assert not until_matched or in_flight == 1
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = ProblemSearch(problem, sampler_name, seed, in_flight, until_matched)
    search.run(most)
    truth = search.truth
    whole = truth.whole_kJ, len(truth.logs), len(truth.logs)
    kJ, launches, measurements = search.found or whole
    if search.found and not until_matched:  # with what was in flight
        kJ, launches, measurements = search.kJ, search.submitted, len(search.measured)
    return Run(
        sampler=sampler_name,
        problem=problem,
        seed=seed,
        kJ=kJ,
        launches=launches,
        measurements=measurements,
        found=search.found is not None,
        matched_kJ=(search.matched or whole)[0] if until_matched else math.nan,
        curve=tuple(search.curve),
        plan_s=statistics.median(search.plan_s),
        search_s=search.executor.now_s(),
    )


@dataclass(frozen=True)
class RunOptions:
    """Options of the runs of a benchmark.

    Attributes:
        samplers: names of the samplers.
        seeds: of each sampler on each problem.
        most, until_matched: as of `run`.
        jobs: number of processes.
    """

    samplers: tuple[str, ...]
    seeds: tuple[int, ...]
    most: int
    until_matched: bool = False
    jobs: int = 1


def all_runs(
    options: RunOptions, problems: Sequence[Problem], in_flight: int = 1
) -> dict[tuple[Problem, str], list[Run]]:
    """Return the runs of each problem and sampler; with several jobs in other processes."""
    keys = [(problem, name) for problem in problems for name in options.samplers]
    work = [
        (problem, name, seed, in_flight, options.most, options.until_matched)
        for problem, name in keys
        for seed in options.seeds
    ]
    each = len(options.seeds)
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            done = list(pool.map(run, *zip(*work, strict=True), chunksize=each))
    else:
        done = [run(*arguments_of_one) for arguments_of_one in work]
    return {key: done[i * each : (i + 1) * each] for i, key in enumerate(keys)}
