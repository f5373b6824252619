"""How much faster a search is on several nodes, and how busy they are, on simulated time.

The same search runs with one probe at a time and with one on each of several nodes. Joules are
those of the probes and of the nodes that idle meanwhile: all nodes are allocated until the answer
is there. The simulated cluster's truth is known, so the answers are compared, too.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import tuner
from benchmarks.figures import Figure
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.simulated.runner import SimulatedRunner
from tuner.workload.records.probe import NextSettings, ProbeRecord, ProbeRequest

#: Job, cluster (of one node's probes) and number of probes.
CASES = (("opt-350m", "a100-8", 16),)
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Searched:
    """A search on some nodes."""

    nodes: int
    time_s: float
    busy_s: float  # node seconds of its probes
    probes_kJ: float
    idle_kJ: float
    answer_kJ: float  # true energy of the training as recommended
    answer_s: float
    timeline: tuple[tuple[float, float, str], ...]

    @property
    def busy(self) -> float:
        """Share of the node seconds in which a probe ran."""
        return self.busy_s / (self.nodes * self.time_s)

    @property
    def spent_kJ(self) -> float:
        """Energy of all nodes until the answer."""
        return self.probes_kJ + self.idle_kJ


class _Timed(SimulatedExecutor):
    """Simulated executor that keeps when each probe ran."""

    def __init__(self, runner: SimulatedRunner, capacity: int) -> None:
        super().__init__(runner, capacity=capacity)
        self.began_s: dict[str, float] = {}
        self.ran: list[tuple[float, float, str]] = []
        self.spent_J = 0.0

    def submit(self, request: ProbeRequest, extend: NextSettings | None = None) -> None:
        self.began_s[request.probe_id] = self.now_s()
        super().submit(request, extend)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        record = super().wait(timeout_s)
        if record is not None:
            name, purpose = record.request.probe_id, record.request.purpose
            self.spent_J += record.energy_J
            self.ran.append((self.began_s[name], self.now_s(), f"{name} {purpose}"))
        return record


def search(
    job: TrainingJob, cluster: Cluster, *, nodes: int, max_probes: int, seed: int = 0
) -> Searched:
    """Run a search with that number of probes at a time."""
    executor = _Timed(SimulatedRunner(job, cluster, seed=seed), nodes)
    with tempfile.TemporaryDirectory() as folder:
        result: Any = tuner.optimize(
            job=job,
            cluster=cluster,
            executor=executor,
            search=SearchSettings(max_probes=max_probes, seed=seed),
            runs_dir=folder,
            report=False,
            progress=False,
        )
    choice = result.recommended.configuration
    truth = AnalyticModel(job, cluster).predict([choice])
    steps = job.steps_with(choice.get("global_batch") or job.global_batch) or 1
    step_s, power_W = float(truth.step_time_s[0]), float(truth.power_W[0])
    busy_s = sum(end - begin for begin, end, _ in executor.ran)
    time_s = executor.now_s()
    idle_W = cluster.device.idle_W * cluster.devices_per_node
    return Searched(
        nodes=nodes,
        time_s=time_s,
        busy_s=busy_s,
        probes_kJ=executor.spent_J / 1000,
        idle_kJ=idle_W * (nodes * time_s - busy_s) / 1000,
        answer_kJ=steps * step_s * power_W / 1000,
        answer_s=steps * step_s,
        timeline=tuple(executor.ran),
    )


@cache
def figures() -> list[Figure]:
    """Return speed-ups, shares of busy nodes and joules."""
    runs: dict[int, list[Searched]] = {}
    for job_name, cluster_name, probes in CASES:
        job, cluster = load_job(job_name), replace(load_cluster(cluster_name), nodes=1)
        for seed in SEEDS:
            for nodes in (1, 4, 16):
                run = search(job, cluster, nodes=nodes, max_probes=probes, seed=seed)
                runs.setdefault(nodes, []).append(run)
                print(
                    f"{job_name} on {nodes} x {cluster_name}, seed {seed}: {run.time_s:.0f} s, "
                    f"{len(run.timeline)} probes, busy {run.busy:.0%}, probes "
                    f"{run.probes_kJ:.0f} kJ, idle {run.idle_kJ:.0f} kJ, the answer takes "
                    f"{run.answer_kJ:.0f} kJ and {run.answer_s:.0f} s",
                    flush=True,
                )
                for begin, end, what in run.timeline:
                    print(f"  {begin:6.0f} to {end:6.0f} s  {what}")

    def speedup(nodes: int) -> float:
        pairs = zip(runs[1], runs[nodes], strict=True)
        return float(np.exp(np.mean([np.log(one.time_s / many.time_s) for one, many in pairs])))

    def share(nodes: int, figure: str) -> float:
        pairs = zip(runs[1], runs[nodes], strict=True)
        ratios = [np.log(getattr(many, figure) / getattr(one, figure)) for one, many in pairs]
        return float(np.exp(np.mean(ratios)))

    return [
        Figure("nodes_busy", 100 * float(np.mean([run.busy for run in runs[4]])), "%"),
        Figure("speedup_4_nodes", speedup(4), "ratio"),
        Figure("speedup_16_nodes", speedup(16), "ratio"),
        Figure("joules_4_nodes", share(4, "probes_kJ"), "of one node's"),
        Figure("answer_4_nodes", share(4, "answer_kJ"), "of one node's"),
    ]
