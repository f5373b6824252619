"""One run of one sampler on one group of a table, and all runs of a benchmark."""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from tuner.executors.local import SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel, Prior
from tuner.models.surrogate.surrogate_choice import OURS as OUR_SURROGATE
from tuner.models.surrogate.surrogate_choice import SURROGATES, regressor_of
from tuner.pareto import hypervolume, nondominated, reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.settings import SamplerDesign
from tuner.search.optuna_samplers import OURS, make_sampler
from tuner.search.planner import ProbePlanner
from tuner.search.sampler import CandidateSampler
from tuner.search.transfer import EarlierPrior, earlier_of_group
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.study.recorder import StudyRecorder
from tuner.workload.probe import Measurement, ProbeRecord, ProbeRequest
from tuner.workload.replay import TableRunner
from tuner.workload.table import PredictedBy, RecordedTable, load_table

#: The front is found when this share of its hypervolume at most is missing.
WITHIN = 0.01
DEFAULT_SAMPLERS = (OURS, "tpe", "nsgaii", "random")
#: Ours with the analytic models of what a table recorded.
WITH_MODELS = f"{OURS}+models"
#: Ours with another surrogate.
WITH_SURROGATE = {f"{OURS}/{name}": name for name in SURROGATES if name != OUR_SURROGATE}
#: Our sampler with one design choice left out or made otherwise.
ABLATIONS = {
    "no-sweep": SamplerDesign(max_live=1, extend_launches=False),
    "a-setting-at-a-time": SamplerDesign(max_live=1),
    "fill-every-slot": SamplerDesign(in_flight_share=math.inf),
    "sweep-chosen-at-launch": SamplerDesign(extend_launches=False),
    "no-cost": SamplerDesign(cost_weight=0.0),
    "no-split-kernel": SamplerDesign(split_kernel=False),
    "no-own-level": SamplerDesign(own_level=False),
    "start-of-3-settings": SamplerDesign(start_live=3),
    "start-of-2-launches": SamplerDesign(start_launches=2),
    "start-of-4-launches": SamplerDesign(start_launches=4),
}


@dataclass(frozen=True)
class Truth:
    """One group's noise-free means and what they bound.

    Attributes:
        logs: configuration -> (log energy, log time).
        reference: where hypervolume is counted from.
        whole: the true front's hypervolume.
        whole_kJ: kilojoules of launching every point by itself.
        oracle_kJ, oracle_launches, oracle_measurements: what the oracle pays.
    """

    logs: dict[Any, tuple[float, float]]
    reference: np.ndarray
    whole: float
    whole_kJ: float
    oracle_kJ: float
    oracle_launches: int
    oracle_measurements: int


def truth_of(table: RecordedTable, group: str) -> Truth:
    """Return the noise-free means of a group and its oracle's costs."""
    points = table.group(group).points
    logs = {p.configuration: (math.log(p.energy_J), math.log(p.time_s)) for p in points}
    array = np.array(list(logs.values()))
    reference = reference_point(array)
    on_front = nondominated(array[:, 0], array[:, 1])
    visits: dict[Any, list[float]] = {}
    for point, front in zip(points, on_front, strict=True):
        if front:
            visits.setdefault(point.configuration.launch, []).append(point.power_W)
    return Truth(
        logs=logs,
        reference=reference,
        whole=hypervolume(array, reference),
        whole_kJ=sum(table.cost.energy_J([p.power_W]) for p in points) / 1000,
        oracle_kJ=sum(table.cost.energy_J(powers) for powers in visits.values()) / 1000,
        oracle_launches=len(visits),
        oracle_measurements=sum(map(len, visits.values())),
    )


@dataclass(frozen=True)
class Run:
    """One run of one sampler on one group.

    Attributes:
        kJ, launches, measurements: until the front was found, or the whole table's.
        found: whether it was.
        curve: (kJ, share of the hypervolume missing) after each probe.
        ask_s: the driver's median seconds a plan.
        search_s: how long the search would have taken, seconds on the table's clock.
    """

    sampler: str
    group: str
    seed: int
    kJ: float
    launches: int
    measurements: int
    found: bool
    curve: tuple[tuple[float, float], ...]
    ask_s: float
    search_s: float


def sampler_named(
    name: str,
    candidates: Candidates,
    cost: ProbeCost,
    seed: int,
    earlier: Sequence[Prior] = (),
    recorded: PredictedBy | None = None,
) -> ProbePlanner:
    """Return a sampler of the benchmark.

    Args:
        recorded: the job and the cluster behind the candidates, which `WITH_MODELS` needs.
    """
    if name == WITH_MODELS:
        assert recorded is not None
        return CandidateSampler(
            candidates,
            prior=AnalyticModel(recorded.job, recorded.cluster),
            cost=cost,
            seed=seed,
            earlier=earlier,
            memory_bytes=float(recorded.cluster.device.memory_bytes),
        )
    if name in WITH_SURROGATE:
        surrogate = regressor_of(WITH_SURROGATE[name])
        return CandidateSampler(candidates, cost=cost, seed=seed, surrogate=surrogate)
    if name in ABLATIONS:
        return CandidateSampler(candidates, cost=cost, seed=seed, design=ABLATIONS[name])
    return make_sampler(name, candidates, cost=cost, seed=seed, earlier=earlier)


@lru_cache(maxsize=64)
def earlier_prior(folder: Path, source: str, group: str) -> EarlierPrior:
    """Return one group's record as a prior for another's candidates."""
    table = load_table(folder)
    here = Candidates.from_configurations(p.configuration for p in table.group(group).points)
    return EarlierPrior(earlier_of_group(table, source), here)


def neighbour(table: RecordedTable, group: str, column: str) -> str | None:
    """Return the next group, in the table's order and round, that differs in this column only."""
    names = [each.name for each in table.groups]
    place = names.index(group)
    here = table.groups[place].values
    for each in (*table.groups[place + 1 :], *table.groups[:place]):
        if [name for name in here if each.values.get(name) != here[name]] == [column]:
            return each.name
    return None


def run(
    folder: Path,
    group: str,
    sampler_name: str,
    seed: int,
    in_flight: int = 1,
    most: int = 10**9,
    source: str | None = None,
) -> Run:
    """Search one group until the front is found, `most` points are measured, or none is left.

    Args:
        source: the group of the same table that is known before.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load_table(folder)
    truth = truth_of(table, group)
    executor = SimulatedExecutor(TableRunner(table, group, seed=seed), capacity=in_flight)
    candidates = Candidates.from_configurations(truth.logs)
    earlier = earlier_prior(folder, source, group).means if source is not None else ()
    cost = ProbeCost(**asdict(table.cost))
    sampler = sampler_named(sampler_name, candidates, cost, seed, earlier, table.predicted_by)
    book = StudyRecorder.in_memory(sampler)
    measured: list[tuple[float, float]] = []
    curve: list[tuple[float, float]] = []
    ask_s: list[float] = []
    kJ, submitted, missing = 0.0, 0, 1.0

    def points_of(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> list[tuple[float, float]]:
        return [truth.logs[Configuration(request.launch, m.live)] for m in windows]

    def missing_of(points: list[tuple[float, float]]) -> float:
        return max(1 - hypervolume(np.array(points), truth.reference) / truth.whole, 0.0)

    def next_settings(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        if missing_of(measured + points_of(request, windows)) <= WITHIN:
            return ()
        began = time.perf_counter()
        more = book.next_settings(ProbeRecord(request, tuple(windows), executor.meter))
        ask_s.append(time.perf_counter() - began)
        return more

    executor.next_settings = next_settings
    while True:
        while executor.in_flight < in_flight and missing > WITHIN and len(measured) < most:
            if executor.in_flight and sampler.better_to_wait(book.study):
                break
            began = time.perf_counter()
            plan = sampler.plan(book.study)
            ask_s.append(time.perf_counter() - began)
            if plan is None:
                break
            request = ProbeRequest(
                f"p{submitted:04d}", plan.launch, plan.live, extendable=plan.extendable
            )
            submitted += 1
            book.start(request)
            executor.submit(request)
        # What is in flight when the front is found was started, and is paid for.
        record = executor.wait()
        if record is None:
            break
        book.finish(record)
        kJ += record.energy_J / 1000
        measured += points_of(record.request, record.measurements)
        missing = missing_of(measured)
        curve.append((kJ, missing))
    found = missing <= WITHIN
    return Run(
        sampler=sampler_name,
        group=group,
        seed=seed,
        kJ=kJ if found else truth.whole_kJ,
        launches=submitted if found else len(truth.logs),
        measurements=len(measured) if found else len(truth.logs),
        found=found,
        curve=tuple(curve),
        ask_s=statistics.median(ask_s),
        search_s=executor.now_s(),
    )


def all_runs(
    options: argparse.Namespace, problems: Sequence[tuple[Path, str]], in_flight: int
) -> dict[tuple[Path, str, str], list[Run]]:
    """Return every run by table, group and sampler; with `--jobs` they run in other processes."""
    keys = [(folder, group, name) for folder, group in problems for name in options.samplers]
    work = [
        (folder, group, name, seed, in_flight, options.most)
        for folder, group, name in keys
        for seed in range(options.seeds)
    ]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            done = list(pool.map(run, *zip(*work, strict=True), chunksize=options.seeds))
    else:
        done = [run(*arguments_of_one) for arguments_of_one in work]
    return {key: done[i * options.seeds : (i + 1) * options.seeds] for i, key in enumerate(keys)}
