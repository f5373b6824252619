"""The driver's cost on a large cluster: memory, processor time, probes per second.

Sixty-four nodes are represented by a few raylets on this machine that each claim the devices of
many. Leases, actor calls and records are Ray's own; only the answers are simulated and immediate,
so the driver is what is timed. First the executor and the trace alone, up to 10,000 measurements;
then a whole study, whose memory is printed at 100, 1,000 and 10,000 measurements and per added
measurement.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from tuner.problem.problem import Problem
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.space import load_space
from tuner.workload.records.probe import ProbeRequest, Runner
from tuner.workload.records.trace import TraceWriter

MIB = 2**20


def rss_MiB() -> float:
    """Resident memory of this process now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


def simulated(job: TrainingJob, cluster: Cluster, run_dir: str) -> Runner:
    """The runner of every node."""
    from tuner.simulated.runner import SimulatedRunner

    return SimulatedRunner(job, cluster)


def requests(job: TrainingJob, cluster: Cluster, count: int, live: int) -> Iterator[ProbeRequest]:
    """Probes of one node each, through all launches again and again, `live` settings a probe."""
    candidates = load_space("default").candidates(job, replace(cluster, nodes=1))
    pairs = list(zip(candidates.launches, candidates.lives, strict=True))
    for number, (launch, lives) in enumerate(islice(cycle(pairs), count)):
        visits = tuple(islice(cycle(lives), live))
        # Simulated seconds, which a large model's steps need and nobody waits for.
        yield ProbeRequest(f"p{number:05d}", launch, visits, time_limit_s=3600.0)


class Sweep(ProbePlanner):
    """Planner that visits launch after launch at all of its live settings, round and round.

    Planning costs the driver next to nothing.

    Args:
        problem: whose candidates are swept.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.candidates)
        self._rounds = cycle(self._members)

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """The next launch."""
        return self._plan_of(next(self._rounds).tolist(), "swept")


def executor_alone(
    executor: Any, job: TrainingJob, cluster: Cluster, options: Any, folder: Path
) -> list[Figure]:
    """Submit, wait, write: what the driver does without a sampler."""
    waiting = requests(job, cluster, options.probes, options.live)
    done = measured = failed = 0
    memory: dict[int, float] = {}
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    most = 0
    with closing(TraceWriter(folder / "trace" / "probes.jsonl")) as writer:
        upcoming = next(waiting, None)
        while upcoming is not None or executor.in_flight:
            while upcoming is not None and executor.in_flight < executor.capacity:
                executor.submit(upcoming)
                upcoming = next(waiting, None)
            most = max(most, executor.in_flight)
            record = executor.wait()
            writer.append(record)
            done, measured = done + 1, measured + len(record.measurements)
            failed += not record.ok
            for mark in (100, 1_000, 10_000):
                if measured >= mark and mark not in memory:
                    memory[mark] = rss_MiB()
                    print(f"{measured} measurements, driver {memory[mark]:.1f} MiB", flush=True)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    print(f"{done} probes, {failed} failed, up to {most} in flight, {wall_s:.1f} s", flush=True)
    return [
        Figure("nodes_stood_for", options.nodes, "count"),
        Figure("probes", done, "count"),
        Figure("measurements", measured, "count"),
        Figure("most_submitted_at_once", most, "count"),
        Figure("wall_s", wall_s, "s"),
        Figure("probes_per_s", done / wall_s, "1/s"),
        Figure("driver_cpu_per_probe_ms", 1000 * cpu_s / done, "ms"),
        *(Figure(f"driver_memory_at_{mark}_MiB", memory[mark], "MiB") for mark in memory),
        Figure("driver_memory_MiB", rss_MiB(), "MiB"),
    ]


def growth_KiB(memory: dict[int, float], last_MiB: float, measured: int) -> float:
    """What a measurement adds to the driver, after the first thousand (or hundred)."""
    since = 1_000 if 1_000 in memory else 100
    return 1024 * (last_MiB - memory[since]) / max(1, measured - since)


def whole_study(cluster: Cluster, options: Any, folder: Path, address: str) -> list[Figure]:
    """The driver as a user's: sampler, study, trace, what it keeps of every record."""
    from tests.support.studies import problem_of_job
    from tuner.cluster.executor import RayExecutor
    from tuner.problem.run_folder import RunFolder
    from tuner.problem.settings import SearchSettings
    from tuner.study.events import Progress
    from tuner.study.request import StudyRequest
    from tuner.study.session import Session

    # Jobs of one node, many at a time.
    problem = problem_of_job(load_job(options.job), replace(cluster, nodes=1), predicted=True)
    assert problem.job is not None
    memory: dict[int, float] = {}
    counted = {"measurements": 0}

    def notice(event: Progress) -> None:
        if event.record is not None:
            counted["measurements"] += len(event.record.measurements)
            for mark in (100, 1_000, 10_000):
                if counted["measurements"] >= mark and mark not in memory:
                    memory[mark] = rss_MiB()
                    print(f"{counted['measurements']} told, {memory[mark]:.1f} MiB", flush=True)
            memory[0] = rss_MiB()  # the last; what the answer and its plots take comes after

    began_s, began_cpu_s = time.monotonic(), time.process_time()
    run = RunFolder.named(folder, "study")
    Session(
        problem,
        lambda announce: RayExecutor(
            problem.job,
            problem.cluster,
            run_dir=run.path,
            address=address,
            make_runner=simulated,
        ),
        StudyRequest(
            search=SearchSettings(
                max_probes=options.study_probes, time_limit_s=3600.0, verify=False
            ),
            sampler=None if options.sampler == "joulefront" else Sweep(problem),
        ),
        run=run,
        notify=notice,
    ).run()
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    measured, last_MiB = counted["measurements"], memory.pop(0)
    print(f"study: {measured} measurements, driver {last_MiB:.1f} MiB, {wall_s:.1f} s", flush=True)
    return [
        Figure("study_measurements", measured, "count"),
        Figure("study_wall_s", wall_s, "s"),
        Figure("study_driver_cpu_s", cpu_s, "s"),
        *(Figure(f"study_memory_at_{mark}_MiB", memory[mark], "MiB") for mark in memory),
        Figure("study_memory_a_measurement_KiB", growth_KiB(memory, last_MiB, measured), "KiB"),
        Figure("study_memory_at_the_end_MiB", last_MiB, "MiB"),
    ]


def main() -> None:
    parser = arguments("what a large cluster costs the driver")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--raylets", type=int, default=4)
    parser.add_argument("--probes", type=int, default=1250)
    parser.add_argument("--live", type=int, default=8, help="settings a probe")
    parser.add_argument("--study-probes", type=int, default=0, help="0: no study")
    parser.add_argument(
        "--sampler",
        choices=("sweep", "joulefront"),
        default="sweep",
        help="of the study; sweep is this module's",
    )
    parser.add_argument("--job", default=None)
    options = parser.parse_args()
    from ray.cluster_utils import Cluster as RayCluster

    from tuner.cluster.executor import RayExecutor

    job = load_job(options.job)
    cluster = replace(load_cluster("h200-8"), nodes=options.nodes)
    each = -(-options.nodes // options.raylets) * cluster.devices_per_node
    print(f"{options.raylets} raylets stand for {options.nodes} nodes of 8 GPUs", flush=True)
    ray_cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": each})
    for _ in range(options.raylets - 1):
        ray_cluster.add_node(num_cpus=1, num_gpus=each)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            executor = RayExecutor(
                job, cluster, run_dir=folder, address=ray_cluster.address, make_runner=simulated
            )
            with closing(executor):
                figures = executor_alone(executor, job, cluster, options, folder)
            if options.study_probes:
                figures += whole_study(cluster, options, folder, ray_cluster.address)
    finally:
        ray_cluster.shutdown()
    publish(figures, options.json)


if __name__ == "__main__":
    main()
