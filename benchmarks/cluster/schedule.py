"""How much faster a search is on four nodes, and how busy they are, on simulated time.

The same search runs with one probe at a time and with one on each of four nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

import tuner
from benchmarks.figures import Figure
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import load_job
from tuner.simulated.runner import SimulatedRunner
from tuner.workload.records.probe import NextSettings, ProbeRecord, ProbeRequest

#: Job, cluster (of one node's probes), number of probes, and seeds.
JOB, CLUSTER, PROBES = "opt-350m", "a100-8", 16
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Searched:
    """A search on some nodes, with the begin and end of each probe, seconds."""

    nodes: int
    time_s: float
    timeline: Sequence[tuple[float, float, str]]

    @property
    def busy(self) -> float:
        """Share of the node seconds in which a probe ran."""
        ran_s = sum(end - begin for begin, end, _ in self.timeline)
        return ran_s / (self.nodes * self.time_s)


class _Timed(SimulatedExecutor):
    """Simulated executor that keeps when each probe ran."""

    def __init__(self, runner: SimulatedRunner, capacity: int) -> None:
        super().__init__(runner, capacity=capacity)
        self.began_s: dict[str, float] = {}
        self.ran: list[tuple[float, float, str]] = []

    def submit(self, request: ProbeRequest, extend: NextSettings | None = None) -> None:
        self.began_s[request.probe_id] = self.now_s()
        super().submit(request, extend)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        record = super().wait(timeout_s)
        if record is not None:
            name, purpose = record.request.probe_id, record.request.purpose
            self.ran.append((self.began_s[name], self.now_s(), f"{name} {purpose}"))
        return record


def search(nodes: int, seed: int) -> Searched:
    """Run a search with that number of probes at a time."""
    job, cluster = load_job(JOB), replace(load_cluster(CLUSTER), nodes=1)
    executor = _Timed(SimulatedRunner(job, cluster, seed=seed), nodes)
    with tempfile.TemporaryDirectory() as folder:
        tuner.optimize(
            job=job,
            cluster=cluster,
            executor=executor,
            search=SearchSettings(max_probes=PROBES, seed=seed),
            runs_dir=folder,
            report=False,
            progress=False,
        )
    return Searched(nodes, executor.now_s(), executor.ran)


@cache
def figures() -> list[Figure]:
    """Return the share of busy nodes and the speed-up."""
    runs: dict[int, list[Searched]] = {1: [], 4: []}
    for seed in SEEDS:
        for nodes, several in runs.items():
            run = search(nodes, seed)
            several.append(run)
            print(
                f"{JOB} on {nodes} x {CLUSTER}, seed {seed}: {run.time_s:.0f} s, "
                f"{len(run.timeline)} probes, busy {run.busy:.0%}",
                flush=True,
            )
            for begin, end, what in run.timeline:
                print(f"  {begin:6.0f} to {end:6.0f} s  {what}")
    faster = [np.log(one.time_s / four.time_s) for one, four in zip(runs[1], runs[4], strict=True)]
    return [
        Figure("nodes_busy", 100 * float(np.mean([run.busy for run in runs[4]])), "%"),
        Figure("speedup_4_nodes", float(np.exp(np.mean(faster))), "ratio"),
    ]
