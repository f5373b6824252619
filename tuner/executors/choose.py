"""Executors by name: on a cluster, inline, or simulated."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.executors.base import Executor
from tuner.executors.local import Announce, LocalNode, SimulatedExecutor
from tuner.problem.problem import Problem
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.job import TrainingJob
from tuner.workload.node.machine import detect_cluster

if TYPE_CHECKING:
    from tuner.cluster.executor import RayExecutor

EXECUTORS = ("ray", "inline", "simulated")


def check_executor(name: str | Executor | None) -> None:
    """Raise UnknownName if there is no executor of that name."""
    if isinstance(name, str) and name not in EXECUTORS:
        raise UnknownName("executor", name, EXECUTORS)


def needs_ray(cluster: Cluster, address: str | None) -> bool:
    """Return True if probes run on several nodes or beside each other on parts of this one.

    Otherwise one runs after the other, since a node's energy and cores belong to one probe.
    """
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized()  # by the user's program
    if address is not None or joined or cluster.nodes > 1:
        return True
    if not cluster.device.is_gpu:
        return False
    with contextlib.suppress(InputError):
        here = detect_cluster()
        return here.device.is_gpu and here.devices_per_node > cluster.devices_per_node
    return False


def how_started(name: str | Executor | None, cluster: Cluster, address: str | None) -> str:
    """Return how the executor of that name starts probes, as a phrase."""
    if name == "simulated":
        return "nothing: probes are predictions of the models"
    if name != "ray" and (name is not None or not needs_ray(cluster, address)):
        return "processes of this machine, one probe at a time"
    return f"Ray, by joining {address}" if address else "a Ray of its own, on loopback only"


def simulated_executor(problem: Problem, *, seed: int = 0) -> SimulatedExecutor:
    """Return a simulated cluster, which runs as many probes as its nodes hold of the baseline."""
    from tuner.models.simulated_cluster import AS_PREDICTED, SimulatedRunner

    job, cluster = _measured(problem)
    ranks = problem.baseline.world_size
    capacity = max(1, cluster.nodes // -(-ranks // cluster.devices_per_node))
    runner = SimulatedRunner(job, cluster, seed=seed, conditions=AS_PREDICTED)
    return SimulatedExecutor(runner, capacity=capacity)


def _measured(problem: Problem) -> tuple[TrainingJob, Cluster]:
    assert problem.job is not None
    assert problem.cluster is not None
    return problem.job, problem.cluster


def open_executor(
    name: str | None,
    job: TrainingJob,
    cluster: Cluster,
    *,
    run_dir: Path,
    announce: Announce,
    address: str | None = None,
    node: LocalNode | None = None,
) -> Executor:
    """Return a prepared executor that measures; inline on `node`, if that is given.

    By default it is Ray where `needs_ray`, and inline elsewhere, or where this machine can start no
    Ray and no address is given.
    """
    if name == "ray" or (name is None and needs_ray(cluster, address)):
        from tuner.cluster.executor import RayExecutor
        from tuner.cluster.joining import RayUnavailable

        if node is not None:  # its agents open their own meters
            node.close()
        try:
            made = RayExecutor(job, cluster, run_dir=run_dir, announce=announce, address=address)
        except RayUnavailable as error:
            if name or address:
                raise
            announce(f"{error.why}, so probes run inline, one at a time.")
        else:
            return _prepared(made)
    here = node or LocalNode()
    try:
        return here.executor(job, cluster, run_dir=run_dir, announce=announce)
    except BaseException:
        here.close()
        raise


def _prepared(made: RayExecutor) -> RayExecutor:
    try:
        made.prepare()
    except BaseException:
        made.close()
        raise
    return made


def executor_of(
    name: str | Executor | None,
    problem: Problem,
    run_dir: Path,
    announce: Announce,
    *,
    seed: int = 0,
    address: str | None = None,
    node: LocalNode | None = None,
) -> Executor:
    """Return the executor that a study's request means, inline on `node`, if that is given."""
    if name is not None and not isinstance(name, str):
        return name
    if name == "simulated":
        return simulated_executor(problem, seed=seed)
    job, cluster = _measured(problem)
    return open_executor(
        name, job, cluster, run_dir=run_dir, announce=announce, address=address, node=node
    )
