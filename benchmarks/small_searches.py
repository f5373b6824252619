"""Searches of three to five probes on recorded tables: whether the answer has the gain.

Twenty searches that begin at what a user runs: eight of vTrain's problems (the widest data
parallelism, one sequence a micro-batch), six of them with the models of their job; the groups of
zeus-nsdi23 if its folder is given (the paper's default batch size at the highest limit, all knobs
of one GPU); a recorded table of this project; nanoGPT on two cores as two measured launches
describe it, whose launches on two ranks crash. Each is asked for the least energy, and has found
the gain if the configuration that its answer names, as recommended or as promising, saves half or
more of what the best one of the table saves, in the logarithm. The truth takes part in nothing
else.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.noisy_cluster import METER, Noise, NoisyRunner, Truth, recorded_truths
from benchmarks.validation import vtrain
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.problem.problem import Problem
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.study.request import StudyRequest
from tuner.study.session import Session
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest
from tuner.workload.records.trace import read_trace

PROBES = (3, 4, 5)
#: Steps of the trainings that follow, which repay every probe.
STEPS = 10_000_000
#: Steps of an epoch, of which zeus-nsdi23 has the time: a window of epochs would take days.
EPOCH_STEPS = 10_000
#: Default batch sizes of Zeus's workloads (NSDI 2023, table 1), by the beginning of the name.
DEFAULT_BATCH = {
    "cifar100": 1024,
    "imagenet": 256,
    "librispeech": 192,
    "movielens": 1024,
    "squad": 32,
    "sentiment140": 128,
}
RECORDED = Path(__file__).parents[1] / "tests/data/cpu-tiny-gpt"
#: Seconds of a step of nanoGPT by micro-batch, of 96 sequences: medians on a busy machine.
NANO_GPT_S = {12: 13.6, 96: 4.5}


@dataclass(frozen=True)
class Case:
    """One search.

    Attributes:
        truth: what it measures; the first configuration is what is run today.
        problem: what it is asked.
        crashes: launches that crash, all of one cause.
    """

    truth: Truth
    problem: Problem
    crashes: frozenset[Settings] = field(default=frozenset())

    def saving(self, configuration: Configuration) -> float:
        """Return what a configuration truly saves, a logarithm."""
        both = (self.truth.baseline, configuration)
        times, powers = zip(*(self.truth.figures[c] for c in both), strict=True)
        return math.log(times[0] / times[1]) + math.log(powers[0] / powers[1])

    @property
    def best(self) -> float:
        """What the best configuration that trains saves."""
        return max(self.saving(c) for c in self.truth.figures if c.launch not in self.crashes)


class _CrashingRunner(NoisyRunner):
    """Runner on which some launches crash, always at the same place."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case.truth, Noise(0.01), seed=seed)
        self._crashes = case.crashes

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Measure a launch, or crash."""
        if request.launch not in self._crashes:
            return super().run(request)
        failure = Failure("crash", "RuntimeError: no NCCL", frames=("torch/distributed.py:init",))
        return ProbeRecord(request, (), METER, failure)


def cases(zeus: Path | None) -> Iterator[Case]:
    """Yield the searches."""
    problems = _with_gain()
    for number, launches in enumerate(problems[:: len(problems) // 8][:8]):
        today = vtrain.first_launch(launches)
        ordered = [today, *(each for each in launches if each is not today)]
        truth = Truth("vTrain", {each.configuration: (each.measured_s, 100.0) for each in ordered})
        job = replace(vtrain.job_of(today.problem), steps=STEPS)
        problem = replace(truth.problem(), steps=STEPS)
        if number % 4:
            problem = replace(problem, job=job, cluster=vtrain.cluster_of(today.problem))
        yield Case(truth, problem)
    for truth in recorded_truths(zeus) if zeus else ():
        truth = _zeus(truth)
        yield Case(truth, replace(truth.problem(), steps=STEPS))
    for truth in (*recorded_truths(RECORDED), _nano_gpt()):
        crashes = {c.launch for c in truth.figures if truth.name == "nanoGPT" and c.world_size > 1}
        yield Case(truth, replace(truth.problem(), steps=STEPS), frozenset(crashes))


def _with_gain() -> list[list[vtrain.Launch]]:
    # The problems of vTrain in which what is run today takes 5 % or more above the least time.
    return [
        launches
        for launches in vtrain.problems(vtrain.read_launches()).values()
        if len(launches) >= vtrain.CHOICES
        and vtrain.first_launch(launches).measured_s > 1.05 * min(x.measured_s for x in launches)
    ]


def _zeus(truth: Truth) -> Truth:
    default = next(b for name, b in DEFAULT_BATCH.items() if f": {name}" in truth.name)
    figures = {
        Configuration(Settings(micro_batch=c.get("batch_size")), c.live): (s / EPOCH_STEPS, watts)
        for c, (s, watts) in truth.figures.items()
    }
    size = max(c.micro_batch for c in figures if c.micro_batch <= default)
    alike = (c for c in figures if c.micro_batch == size)
    today = max(alike, key=lambda c: float(str(c.get("power_limit_W"))))
    return Truth(truth.name, {today: figures[today]} | figures)


def _nano_gpt() -> Truth:
    (few, few_s), (many, many_s) = NANO_GPT_S.items()
    each_s = (few_s - many_s) / (96 / few - 96 / many)
    launches = [
        Configuration.of(data_parallel=ranks, micro_batch=size)
        for ranks in (1, 2)
        for size in range(1, 97)
        if 96 % (ranks * size) == 0
    ]
    launches.sort(key=lambda c: (c.world_size, c.micro_batch != few))
    time_s = [many_s + each_s * (96 / c.micro_batch - 1) for c in launches]
    return Truth("nanoGPT", {c: (s, 100.0) for c, s in zip(launches, time_s, strict=True)})


def search(case: Case, probes: int, seed: int) -> tuple[float, int]:
    """Search once; return the share of the best gain that is found, and the repeated crashes."""
    executor = SimulatedExecutor(_CrashingRunner(case, seed))
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.named(folder, "study")
        settings = SearchSettings(max_probes=probes, seed=seed)
        request = StudyRequest(search=settings, constraints=Constraints(objective="energy"))
        result = Session(case.problem, lambda announce: executor, request, run=run).run()
        records = read_trace(run.trace).records
    advice = result.recommendation
    assert advice is not None
    named = advice.point if advice.action == "train" else advice.promising
    found = 0.0 if named is None else case.saving(named.configuration)
    return found / case.best, max(0, sum(r.failure is not None for r in records) - 1)


def small_figures(zeus: Path | None, seed: int = 0) -> list[Figure]:
    """Search every case, print a line for each, and return the figures."""
    found, repeated = [], 0
    for case in cases(zeus):
        shares = []
        for probes in PROBES:
            share, crashes = search(case, probes, seed)
            shares.append(share)
            repeated += crashes
        found.append(shares)
        text = ", ".join(f"{share:.2f}" for share in shares)
        print(
            f"{case.truth.name}, {len(case.truth.figures)} configurations, the best of which saves "
            f"{100 * -math.expm1(-case.best):.0f} %: of the gain with 3, 4 and 5 probes {text}",
            flush=True,
        )
    shares_found = np.mean(np.array(found) >= 0.5, axis=0)
    print("searches that find the gain, by probes: " + ", ".join(f"{s:.2f}" for s in shares_found))
    return [
        Figure("gain_found_share", float(np.mean(shares_found)), "ratio"),
        Figure("repeated_crashes", repeated, "count"),
    ]
