"""Executors by name: on a cluster, inline, or simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tuner.executors.base import Executor
from tuner.executors.local import InlineExecutor, SimulatedExecutor
from tuner.problem.problem import Problem
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.job import TrainingJob

Announce = Callable[[str], None]
EXECUTORS = ("ray", "inline", "simulated")


def check_executor(name: str | Executor | None) -> None:
    """Raise UnknownName if there is no executor of that name."""
    if isinstance(name, str) and name not in EXECUTORS:
        raise UnknownName("executor", name, EXECUTORS)


def how_started(name: str | Executor | None, address: str | None) -> str:
    """Return how the executor of that name starts probes, as a phrase."""
    if name == "simulated":
        return "nothing: probes are predictions of the models"
    if name not in (None, "ray"):
        return "processes of this machine, one probe at a time"
    return f"Ray, by joining {address}" if address else "a Ray of its own, on loopback only"


def simulated_executor(problem: Problem, *, seed: int = 0) -> SimulatedExecutor:
    """Return a simulated cluster, which runs as many probes as its nodes hold of the baseline."""
    from tuner.models.simulated_cluster import AS_PREDICTED, SimulatedRunner

    job, cluster = _measured(problem)
    ranks = problem.baseline.world_size if problem.baseline else cluster.devices
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
) -> Executor:
    """Return a prepared executor that measures.

    By default it is Ray, or inline where no address is given and this machine can start no Ray.
    """
    from tuner.executors.ray_cluster import RayUnavailable
    from tuner.executors.ray_executor import RayExecutor
    from tuner.workload.node.runner import LocalRunner

    made: RayExecutor | LocalRunner | None = None
    if name in (None, "ray"):
        try:
            made = RayExecutor(job, cluster, run_dir=run_dir, announce=announce, address=address)
        except RayUnavailable as error:
            if name or address:
                raise
            announce(f"{error.why}, so probes run inline, one at a time.")
    if made is None:
        made = LocalRunner(job, cluster, run_dir=run_dir, announce=announce, keep=True)
    try:
        made.prepare()
    except BaseException:
        made.close()
        raise
    return made if isinstance(made, RayExecutor) else InlineExecutor(made, keep_in=run_dir)


def executor_of(
    name: str | Executor | None,
    problem: Problem,
    run_dir: Path,
    announce: Announce,
    *,
    seed: int = 0,
    address: str | None = None,
) -> Executor:
    """Return the executor that a study's request means."""
    if name is not None and not isinstance(name, str):
        return name
    if name == "simulated":
        return simulated_executor(problem, seed=seed)
    return open_executor(
        name, *_measured(problem), run_dir=run_dir, announce=announce, address=address
    )
