"""The question that the arguments of `tuner.optimize` ask: what is tuned, where, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.executors.base import Executor
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.study.callbacks import Progress
from tuner.workload.scripts.script_job import Script, ScriptJob

if TYPE_CHECKING:
    from tuner.problem.problem import Problem

__all__ = ["Notify", "Question", "question_of"]

Notify = Callable[[Progress], None]


@dataclass(frozen=True)
class Question:
    """Arguments of `optimize` that were checked: what is run, and where."""

    job: TrainingJob | Script | str | Path | None
    cluster: Cluster | str
    space: str | None
    constraints: Constraints
    settings: SearchSettings
    executor: str | Executor | None
    name: str | None
    runs_dir: str | Path

    @property
    def simulated(self) -> bool:
        """True if the models answer the probes."""
        return self.executor == "simulated"

    def prepare(
        self,
        baseline: Configuration | str | Path | Sequence[str | Path] | None,
        target_gpus: int | None,
        clocks: bool,
        notify: Notify | None,
    ) -> tuple[Problem, RunFolder, SearchSettings]:
        """Return the problem, the run folder and the settings; a script is started once."""
        from tuner.problem.default_space import space_of_run
        from tuner.problem.from_job import problem_of_job

        job, cluster, name, settings = self.job, self.cluster, self.name, self.settings
        if isinstance(job, Script):
            name = name or new_name(job.name, self.runs_dir)
            run = RunFolder.named(self.runs_dir, name)
            job, cluster = _inspected(job, cluster, run, self.simulated, notify)
        before = RunFolder.named(self.runs_dir, name).read_study() if name else None
        problem = problem_of_job(
            job,
            cluster,
            self.space or space_of_run(before),
            baseline=baseline,
            plan=self.simulated,
            target_gpus=target_gpus,
            max_gpus=self.constraints.max_gpus,
            clocks=clocks,
        )
        if self.simulated:
            problem = _as_prediction(problem)
            settings = replace(settings, verify=False)  # it would repeat the prediction
        run = RunFolder.named(self.runs_dir, name or new_name(problem.name, self.runs_dir))
        return problem, run, settings


def question_of(
    job: TrainingJob | Script | str | Path | None,
    *,
    cluster: Cluster | str,
    space: str | None,
    constraints: Constraints,
    search: SearchSettings | None,
    executor: str | Executor | None,
    ray_address: str | None,
    device_kind: str | None,
    in_flight: int | None,
    name: str | None,
    runs_dir: str | Path,
    notify: Notify | None,
) -> Question:
    """Return the checked arguments, with the cluster and the executor that they mean.

    Raises:
        InputError: they contradict each other.
    """
    from tuner.executors.choose import check_executor

    check_executor(executor)
    if ray_address is not None or device_kind is not None:
        run_folder = RunFolder.named(runs_dir, name) if name else None
        cluster = _on_ray(ray_address, device_kind, executor, cluster, run_folder, notify)
        executor = "ray"
    executor = executor or _executor_for(cluster)
    simulated = executor == "simulated"
    if in_flight is not None and not simulated:
        raise InputError(
            "in_flight is for a simulated cluster; a real one runs what it has room for"
        )
    settings = (search or SearchSettings()).with_default_limits(simulated=simulated)
    return Question(job, cluster, space, constraints, settings, executor, name, runs_dir)


def _inspected(
    script: Script, cluster: Cluster | str, run: RunFolder, simulated: bool, notify: Notify | None
) -> tuple[ScriptJob, Cluster]:
    """Return a script as a job, and the machine on which it was inspected."""
    from tuner.problem.user_script import job_of_script
    from tuner.search_spaces.cluster import load_cluster
    from tuner.workload.node.machine import detect_cluster

    if simulated:
        name = cluster if isinstance(cluster, str) else cluster.name
        if name == "auto":
            raise InputError("a script is really run, not simulated; choose another executor")
        raise InputError(
            f"a script is really run, and {name} is only simulated here; tune it on a machine with "
            f"its devices, or predict a job: tuner plan JOB --cluster {name}"
        )
    if not isinstance(cluster, Cluster):
        cluster = detect_cluster() if cluster == "auto" else load_cluster(cluster)
    notify = notify or (lambda event: None)
    say = lambda sentence: notify(Progress("note", None, sentence))  # noqa: E731
    return job_of_script(script, cluster, run, say), cluster


def _on_ray(
    address: str | None,
    device_kind: str | None,
    executor: str | Executor | None,
    cluster: Cluster | str,
    run: RunFolder | None,
    notify: Notify | None,
) -> Cluster:
    """Return the cluster of a study on Ray: the one named, or that of its usable nodes.

    Raises:
        InputError: the words contradict each other, no Ray answers, or no node is fit.
    """
    from tuner.executors.ray_cluster import survey
    from tuner.problem.study_file import parse_cluster
    from tuner.search_spaces.cluster import load_cluster

    if address is None:
        raise InputError("device_kind chooses among the nodes of a Ray cluster; name that too")
    if executor not in (None, "ray"):
        raise InputError(f"a Ray cluster runs probes by the executor ray, not {executor!r}")
    if cluster != "auto":
        named = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        if device_kind not in (None, named.device.name):
            raise InputError(
                f"device_kind is {device_kind!r}, and cluster {named.name!r} is of "
                f"{named.device.name}"
            )
        return named
    notify = notify or (lambda event: None)
    say = lambda sentence: notify(Progress("note", None, sentence))  # noqa: E731
    seen = survey(address, device_kind=device_kind, say=say)
    if seen.cluster is None:
        reasons = "; ".join(seen.sentences()) or "it has none"
        raise InputError(f"no node of the Ray cluster at {address!r} can be used: {reasons}")
    for sentence in seen.sentences():
        say(sentence)
    before = parse_cluster(run.read_study() or {}) if run is not None else None
    if before is not None and (before.name, before.devices_per_node) == (
        seen.cluster.name,
        seen.cluster.devices_per_node,
    ):
        return before  # nodes come and go, and the question stays
    return seen.cluster


def _executor_for(cluster: Cluster | str) -> str | None:
    """Return "simulated" if the cluster has another kind of device than this machine, else None."""
    if cluster == "auto":
        return None
    from tuner.search_spaces.cluster import load_cluster
    from tuner.workload.node.machine import detect_cluster

    wanted = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    here = detect_cluster().device
    alike = wanted.device.name == here.name or wanted.device.type == here.type == "cpu"
    return None if alike else "simulated"


def _as_prediction(problem: Problem) -> Problem:
    """Return the problem with the known errors of the models among its notes."""
    from tuner.models.analytic.known_error import known_error_lines

    assert problem.cluster is not None
    known = [f"known error: {line}" for line in known_error_lines(problem.cluster.device)]
    return replace(problem, notes=(*known, *problem.notes), simulated=True)
