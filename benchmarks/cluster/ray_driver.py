"""The driver's cost on a large cluster: memory, processor time, probes per second.

Sixty-four nodes are represented by a few raylets on this machine that each claim the devices of
many. Leases, actor calls and records are Ray's own; only the answers are simulated and immediate,
so the driver is what is timed: the executor and the trace alone, up to 10,000 measurements.
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


def main() -> None:
    parser = arguments(__doc__, "cluster.ray_driver")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--raylets", type=int, default=4)
    parser.add_argument("--probes", type=int, default=1250)
    parser.add_argument("--live", type=int, default=8, help="settings a probe")
    options = parser.parse_args()
    from ray.cluster_utils import Cluster as RayCluster

    from tuner.cluster.executor import RayExecutor

    job = load_job()
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
    finally:
        ray_cluster.shutdown()
    publish(figures, options.json)


if __name__ == "__main__":
    main()
