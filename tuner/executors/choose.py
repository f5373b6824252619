"""Executors by name: on Ray, inline, or simulated."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from tuner.executors.base import Executor
from tuner.executors.local import InlineExecutor, SimulatedExecutor
from tuner.problem.problem import Problem
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import UnknownName

EXECUTORS = ("ray", "inline", "simulated")


def check_executor(name: str | Executor | None) -> None:
    """Raise UnknownName for a name that no executor has."""
    if isinstance(name, str) and name not in EXECUTORS:
        raise UnknownName("executor", name, EXECUTORS)


def how_started(name: str | Executor | None, ray_address: str | None) -> str:
    """Return how the executor of that name starts probes, as a phrase."""
    if name == "simulated":
        return "nothing: probes are predictions of the models"
    if name not in (None, "ray"):
        return "processes of this machine, one probe at a time"
    return f"Ray, by joining {ray_address}" if ray_address else "a Ray of its own, on loopback only"


def simulated_executor(
    problem: Problem, *, capacity: int | None = None, seed: int = 0
) -> SimulatedExecutor:
    """Return a simulated cluster, which runs as many probes as its nodes hold of the baseline."""
    from tuner.models.simulated import SimulatedRunner

    assert problem.job is not None
    assert problem.cluster is not None
    cluster = problem.cluster
    if capacity is None:
        ranks = problem.baseline.world_size if problem.baseline else cluster.devices
        capacity = max(1, cluster.nodes // -(-ranks // cluster.devices_per_node))
    runner = SimulatedRunner(problem.job, cluster, seed=seed)
    return SimulatedExecutor(runner, capacity=capacity)


def executor_of(
    name: str | Executor | None,
    problem: Problem,
    run: RunFolder,
    say: Callable[[str], None],
    *,
    ray_address: str | None = None,
    avoid_stragglers: bool = False,
    in_flight: int | None = None,
    seed: int = 0,
) -> Executor:
    """Return the executor of that name; by default Ray if it is installed, else inline."""
    if name is not None and not isinstance(name, str):
        return name
    if name is None:
        name = "ray"
        if importlib.util.find_spec("ray") is None:
            say("Ray is not installed, so probes run inline, one at a time.")
            name = "inline"
    assert problem.job is not None
    assert problem.cluster is not None
    if name == "simulated":
        return simulated_executor(problem, capacity=in_flight, seed=seed)
    from tuner.executors.ray_executor import RayExecutor
    from tuner.workload.node.runner import LocalRunner

    if name == "ray":
        made: RayExecutor | LocalRunner = RayExecutor(
            problem.job,
            problem.cluster,
            run_dir=run.path,
            address=ray_address,
            say=say,
            avoid_stragglers=avoid_stragglers,
        )
    else:
        made = LocalRunner(problem.job, problem.cluster, run_dir=run.path, say=say, keep=True)
    try:
        made.prepare()
    except BaseException:
        made.close()
        raise
    return made if isinstance(made, RayExecutor) else InlineExecutor(made, keep_in=run.path)
