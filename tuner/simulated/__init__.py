"""Extra: a cluster whose probes are predictions, and a demonstration of a search on it."""

from __future__ import annotations

from tuner.executors.base import Executor, ExecutorKind, Opening
from tuner.search_spaces.cluster import Cluster


class Simulated(ExecutorKind):
    """Executor that answers probes by the analytic models, on simulated time.

    It runs as many probes at a time as its nodes hold of the baseline.
    """

    PROTOCOL = 1
    measures = False

    def phrase(self, cluster: Cluster, address: str | None) -> str:
        return "nothing: probes are predictions of the models"

    def open(self, opening: Opening) -> Executor:
        from tuner.executors.simulated_time import SimulatedExecutor
        from tuner.simulated.runner import AS_PREDICTED, SimulatedRunner

        cluster = opening.cluster
        capacity = max(1, cluster.nodes // -(-opening.ranks // cluster.devices_per_node))
        runner = SimulatedRunner(opening.job, cluster, seed=opening.seed, conditions=AS_PREDICTED)
        return SimulatedExecutor(runner, capacity=capacity)


KIND = Simulated()
