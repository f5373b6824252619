"""One run of one sampler on one problem, and all runs of a benchmark."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import optuna

from benchmarks.pieces import Pieces
from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.samplers import planner_named
from benchmarks.search.start import StartingAt, start_of
from benchmarks.search.truth import WITHIN, truth_of
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.problem import ProbeCost
from tuner.recordings.table import TableRunner
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest


@dataclass(frozen=True)
class Run:
    """One run of one sampler on one problem.

    Attributes:
        kJ, launches, measurements: until the front was found, or the whole table's.
        found: whether it was.
        curve: (kJ, share of the hypervolume missing, front regret) after each probe.
    """

    sampler: str
    problem: Problem
    seed: int
    kJ: float
    launches: int
    measurements: int
    found: bool
    curve: tuple[tuple[float, float, float], ...]


class ProblemSearch:
    """A search of one problem that ends when the truth says so.

    Args:
        problem: what is searched.
        sampler_name: as of `planner_named`.
        seed: of the sampler and of the noise.
    """

    def __init__(self, problem: Problem, sampler_name: str, seed: int) -> None:
        self.table, self.truth = load_problem(problem), truth_of(problem)
        self.executor = SimulatedExecutor(TableRunner(self.table, problem.group, seed=seed))
        cost = ProbeCost(**asdict(self.table.cost))
        planner = planner_named(
            sampler_name,
            Candidates.from_configurations(self.truth.logs),
            cost,
            seed,
            self.table.predicted_by,
        )
        self.planner = StartingAt(planner, start_of(problem, seed))
        self._cost = cost
        self.records: list[ProbeRecord] = []
        self.measured: list[Configuration] = []
        self.curve: list[tuple[float, float, float]] = []
        self.kJ, self.submitted = 0.0, 0
        #: (kJ, launches, measurements) when the front was found.
        self.found: tuple[float, int, int] | None = None

    def run(self, most: int) -> None:
        """Search until the end, until `most` points are measured, or until none is left."""
        while self.found is None and len(self.measured) < most and self._submit():
            record = self.executor.wait()
            assert record is not None
            self.records.append(record)
            self.kJ += record.energy_J / 1000
            self.measured += record.request.configurations()
            self._note_end(self.measured, self.kJ)
            missing = self.truth.missing(self.measured)
            self.curve.append((self.kJ, missing, self.truth.front_regret(self.measured)))

    @property
    def _state(self) -> PlanningState:
        return PlanningState(records=tuple(self.records), cost=self._cost)

    def _submit(self) -> bool:
        plan = self.planner.plan(self._state)
        if plan is None:
            return False
        name = f"p{self.submitted:04d}"
        request = ProbeRequest(name, plan.launch, plan.live, extendable=plan.extendable)
        self.submitted += 1
        self.executor.submit(request, self._next_settings)
        return True

    def _note_end(self, measured: Sequence[Configuration], kJ: float) -> None:
        if self.found is None and self.truth.missing(measured) <= WITHIN:
            self.found = kJ, self.submitted, len(measured)

    def _next_settings(
        self, request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        so_far = [Configuration(request.launch, m.live) for m in windows]
        powers = {p.configuration: p.power_W for p in self.truth.points}
        launch_kJ = self.table.cost.energy_J(powers[c] for c in so_far) / 1000
        self._note_end([*self.measured, *so_far], self.kJ + launch_kJ)
        if self.found is not None:
            return ()
        record = ProbeRecord(request, tuple(windows), self.executor.meter)
        plan = self.planner.plan_continuation(self._state, record)
        return () if plan is None else plan.live


def run(problem: Problem, sampler_name: str, seed: int, most: int = 10**9) -> Run:
    """Search one problem until the front is found, `most` points are measured, or none is left.

    Args:
        problem: what is searched.
        sampler_name: one of the benchmark's samplers.
        seed: of the sampler and of the noise.
        most: number of measurements after which a run counts as one that never finds the front.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = ProblemSearch(problem, sampler_name, seed)
    search.run(most)
    truth = search.truth
    whole = truth.whole_kJ, len(truth.logs), len(truth.logs)
    kJ, launches, measurements = search.found or whole
    return Run(
        sampler=sampler_name,
        problem=problem,
        seed=seed,
        kJ=kJ,
        launches=launches,
        measurements=measurements,
        found=search.found is not None,
        curve=tuple(search.curve),
    )


@dataclass(frozen=True)
class RunOptions:
    """Options of the runs of a benchmark.

    Attributes:
        samplers: names of the samplers.
        seeds: of each sampler on each problem.
        most: as of `run`.
        pieces: where finished runs are kept.
    """

    samplers: tuple[str, ...]
    seeds: tuple[int, ...]
    most: int
    pieces: Pieces = field(default_factory=Pieces)


def all_runs(
    options: RunOptions, problems: Sequence[Problem]
) -> dict[tuple[Problem, str], list[Run]]:
    """Return the runs of each problem and sampler; with several jobs in other processes."""
    keys = [(problem, name) for problem in problems for name in options.samplers]
    work = [(problem, name, seed, options.most) for problem, name in keys for seed in options.seeds]
    each = len(options.seeds)
    done = options.pieces.results(run, work)
    return {key: done[i * each : (i + 1) * each] for i, key in enumerate(keys)}
