"""Answer for a job that fits in no configuration of a space: by how much, and what would fit."""

from __future__ import annotations

import math

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import Cluster, cluster_names, enlarged, load_cluster
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.space import SearchSpace, load_space, space_names

#: Multiples of the cluster's GPUs that are tried.
MULTIPLES = (2, 4, 8, 16)


def least_memory_bytes(job: TrainingJob, cluster: Cluster, space: SearchSpace) -> float:
    """Return the smallest predicted peak of a GPU in a space; infinite if the space is empty."""
    candidates = space.candidates(job, cluster)
    if not len(candidates):
        return math.inf
    return float(AnalyticModel(job, cluster).memory_bytes(candidates.configurations).min())


def _fits(job: TrainingJob, cluster: Cluster, space: SearchSpace) -> bool:
    memory = cluster.device.memory_bytes
    return (
        cluster.device.type != "cpu"
        and bool(memory)
        and (least_memory_bytes(job, cluster, space) <= memory)
    )


def does_not_fit(
    job: TrainingJob, cluster: Cluster, searched: SearchSpace, count: int, need: float
) -> str:
    """Return a sentence: how much memory is missing, and which space, size or cluster has it.

    The smallest configuration needs `need` bytes on a GPU.
    """
    has = float(cluster.device.memory_bytes or 0)
    spaces = [load_space(name) for name in space_names() if name != searched.name]
    larger = [s for s in spaces if s.choices.keys() > searched.choices.keys()]
    # More parallelism costs less time than offload does.
    larger.sort(key=lambda s: ("tensor_parallel" not in s.choices, len(s.choices)))
    ways = [f"--space {s.name}" for s in larger if _fits(job, cluster, s)][:1]
    sizes = [n * cluster.devices for n in MULTIPLES]
    enough = next((n for n in sizes if _fits(job, enlarged(cluster, n), searched)), None)
    ways += [f"{enough} GPUs"] if enough else []
    others = [name for name in cluster_names() if name != cluster.name]
    ways += [f"--cluster {n}" for n in others if _fits(job, load_cluster(n), searched)][:1]
    tried = f"try {' or '.join(ways)}" if ways else "no built-in space, cluster or size has room"
    return (
        f"{job.name} does not fit on {cluster.name}: the smallest of {count:,} configurations of "
        f"space {searched.name!r} needs {need / 1e9:.1f} GB of a GPU's {has / 1e9:.1f} GB "
        f"({(need - has) / 1e9:.1f} GB too many); {tried}"
    )
