"""Searches that end by a rule of their own: what they pay, and what they miss.

The study's own loop runs on the problem with the default settings and without a limit, as a replay
does: there is no job, so the rule of a recording ends it (`tuner.study.rules`). Neither a baseline
nor a verification is measured, so that the joules are those of the search alone.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from unittest import mock

import optuna

from benchmarks.pieces import Pieces
from benchmarks.search.ask_tell import PEERS, AskTellPlanner
from benchmarks.search.names import OURS
from benchmarks.search.problems import Problem, load_problem
from benchmarks.search.samplers import planner_named
from benchmarks.search.start import StartingAt, start_of
from benchmarks.search.truth import truth_of
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem import problem as studies
from tuner.problem.problem import ProbeCost
from tuner.problem.settings import SearchSettings
from tuner.problem.study_spec import StudySpec
from tuner.recordings.table import TableRunner
from tuner.search_spaces.space import Candidates
from tuner.study import loop as study_loop
from tuner.study.loop import SearchLoop
from tuner.study.rules import StopReason
from tuner.workload.records.probe import ProbeRecord


@dataclass(frozen=True)
class OwnStop:
    """One search that ended by its own rule.

    Attributes:
        sampler: name.
        problem: what was searched.
        seed: of the sampler and of the noise.
        kJ, launches, measurements: of the search.
        relaunches: launches of settings that were launched before.
        cpu_s: the processor's seconds of the driver.
        front_regret: what the search loses of the true front at its end (`tuner.pareto`).
        missing: share of the true front's hypervolume that is missing then.
        reason: kind of the `StopReason`.
    """

    sampler: str
    problem: Problem
    seed: int
    kJ: float
    launches: int
    measurements: int
    relaunches: int
    cpu_s: float = field(compare=False)
    front_regret: float
    missing: float
    reason: str


def own_search(
    problem: Problem, seed: int, sampler_name: str = OURS
) -> tuple[list[ProbeRecord], StopReason]:
    """Search one problem until the product's own rule ends it; return the probes and the reason.

    What is measured again after the stop costs no search and adds no configuration: it is left out.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load_problem(problem)
    cost = ProbeCost(**asdict(table.cost))
    candidates = Candidates.from_configurations(truth_of(problem).logs)
    settings = SearchSettings(verify=False, seed=seed)
    start = start_of(problem, seed)
    asked = studies.Problem(table.name, candidates, 1, baseline=start, cost=cost, identity={})
    planner = planner_named(sampler_name, candidates, cost, seed, table.predicted_by)
    if isinstance(planner, AskTellPlanner):
        planner.ends_itself = True
    loop = SearchLoop(
        spec=StudySpec(table.name, None, asked, settings=settings),
        executor=SimulatedExecutor(TableRunner(table, problem.group, seed=seed)),
        planner_of=lambda _: StartingAt(planner, start),
        records=(),
    )
    # The search begins at the start itself: no launch of today's comes before it.
    with mock.patch.object(study_loop, "baseline_due", return_value=None):
        stop = loop.run()
    return [record for record in loop.records if record.request.purpose == "search"], stop


def search_to_own_stop(problem: Problem, seed: int, sampler_name: str = OURS) -> OwnStop:
    """Search one problem until the product's own rule ends it."""
    began_s = time.process_time()
    records, stop = own_search(problem, seed, sampler_name)
    cpu_s = time.process_time() - began_s
    measured = [c for record in records for c in record.request.configurations()]
    return OwnStop(
        sampler=sampler_name,
        problem=problem,
        seed=seed,
        kJ=math.fsum(record.energy_J for record in records) / 1000,
        launches=len(records),
        measurements=len(measured),
        relaunches=len(records) - len({record.request.launch for record in records}),
        cpu_s=cpu_s,
        front_regret=truth_of(problem).front_regret(measured),
        missing=truth_of(problem).missing(measured),
        reason=stop.kind,
    )


def own_stops(
    problems: Sequence[Problem],
    seeds: Sequence[int],
    samplers: Sequence[str] = (OURS,),
    pieces: Pieces | None = None,
) -> dict[tuple[Problem, str], list[OwnStop]]:
    """Return the searches of each problem and sampler, one a seed.

    Args:
        samplers: ours, or peers that have a rule of their own.
        pieces: where finished searches are kept.
    """
    keys = [(problem, name) for problem in problems for name in samplers]
    work = [(problem, seed, name) for problem, name in keys for seed in seeds]
    done = (pieces or Pieces()).results(search_to_own_stop, work)
    each = len(seeds)
    return {key: done[i * each : (i + 1) * each] for i, key in enumerate(keys)}


def ending(samplers: Sequence[str]) -> list[str]:
    """Return those of these samplers that end a search by a rule of their own, ours first."""
    return [OURS, *(name for name in samplers if name in PEERS and PEERS[name].ends)]
