"""The request of a study: every argument of `tuner.optimize`, declared once.

`optimize`, `replay`, `plan`, a dry run and the command line share it; what it asks of the training
(`constraints`) and of the search (`search`) is kept in study.toml.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.executors.base import Executor
from tuner.problem.constraints import Constraints
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.declared import Knob
from tuner.search_spaces.errors import InputError, NothingToTry
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.options import declared_options, option
from tuner.study.callbacks import Progress
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_job import ScriptJob

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from tuner.problem.problem import Problem
    from tuner.problem.user_script import Launches, RunProbe

Notify = Callable[[Progress], None]
Baseline = Configuration | str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class StudyRequest:
    """Arguments of `tuner.optimize`, which documents them."""

    job: TrainingJob | Script | str | Path | None = None
    cluster: Cluster | str = "auto"
    space: str | None = None
    constraints: Constraints = field(default_factory=Constraints)
    search: SearchSettings = field(default_factory=SearchSettings)
    baseline: Baseline = None
    knobs: Sequence[Knob | str] = ()
    allow_changed_training: bool = option(
        False, "also search knobs that are declared to change what is learnt"
    )
    clocks: bool = option(
        True,
        "search clocks and power limits",
        negated="leave clocks and power limits alone",
    )
    plan: str | Path | None = option(
        None, "begin with the probes that this plan names", metavar="RUN"
    )
    executor: str | Executor | None = option(
        None,
        "ray, inline or simulated, which answers probes by predictions (default: ray, or inline "
        "without Ray)",
    )
    ray_address: str | None = option(
        None, "Ray cluster to run on: auto or HOST:PORT", flag="ray", metavar="ADDRESS"
    )
    avoid_stragglers: bool = option(
        False, "leave nodes that hold others back out of the search, while enough are left"
    )
    device_kind: str | None = None
    in_flight: int | None = None
    sampler: str | BaseSampler | None = option(
        None, "joulefront, tpe, nsgaii, gp or random (default: joulefront)"
    )
    surrogate: Any = option(
        None,
        "model of step time and power: gaussian-process, or a scikit-learn regressor as "
        "sklearn.MODULE.CLASS(NAME=VALUE) (default: gaussian-process)",
        metavar="TEXT",
    )
    try_first: Sequence[str | Configuration] = option(
        (),
        "probe this configuration first: 'dp8 mb4 zero1'; repeatable",
        flag="try",
        metavar="CONFIGURATION",
    )
    name: str | None = option(None, "name of the run; an existing run is continued")
    storage: str | None = None
    runs_dir: str | Path = "runs"

    @property
    def _baseline_words(self) -> list[str]:
        given = self.baseline
        if given is None or isinstance(given, Configuration):
            return []
        return [str(word) for word in ([given] if isinstance(given, str | Path) else given)]

    @property
    def simulated(self) -> bool:
        """True if the models answer the probes."""
        return self.executor == "simulated"

    def checked(self, notify: Notify | None) -> StudyRequest:
        """Return the request with its knobs, and the cluster and the executor that it means.

        Raises:
            InputError: its parts contradict each other, or this machine has other devices than the
                cluster.
        """
        from tuner.executors.choose import check_executor
        from tuner.problem.declared_knobs import with_knobs

        check_executor(self.executor)
        if self.avoid_stragglers and self.ray_address is None:
            raise InputError("avoid_stragglers leaves nodes of a Ray cluster out; join one (--ray)")
        if self.knobs:
            return replace(self, job=with_knobs(self.job, self.knobs), knobs=()).checked(notify)
        cluster, executor = self.cluster, self.executor
        if self.ray_address is not None or self.device_kind is not None:
            cluster, executor = self._on_ray(notify), "ray"
        if executor is None and (device := device_elsewhere(cluster)) is not None:
            raise InputError(self._elsewhere(device))
        simulated = executor == "simulated"
        if isinstance(self.job, Script):
            if simulated:
                raise InputError("a script is really run, not simulated; choose another executor")
            if self.ray_address is None:
                from tuner.workload.scripts.inspection import require_one_node

                require_one_node(self.job)
        if self.in_flight is not None and not simulated:
            raise InputError(
                "in_flight is for a simulated cluster; a real one runs what it has room for"
            )
        search = self.search.with_default_limits(simulated=simulated)
        return replace(self, cluster=cluster, executor=executor, search=search)

    def prepared(self, notify: Notify | None) -> tuple[Problem, RunFolder, StudyRequest]:
        """Return the problem, the run folder and the request; a script is started once."""
        from tuner.problem.default_space import space_of_run
        from tuner.problem.from_job import problem_of_job

        job, cluster, name, request = self.job, self.cluster, self.name, self
        if isinstance(job, Script):
            name = name or new_name(job.name, self.runs_dir)
            run = RunFolder.named(self.runs_dir, name)
            job, cluster = self._inspected(job.stating(self._baseline_words), run, notify)
        before = RunFolder.named(self.runs_dir, name).read_study() if name else None
        problem = problem_of_job(
            job,
            cluster,
            self.space or space_of_run(before),
            baseline=self.baseline,
            plan=self.simulated,
            max_gpus=self.constraints.max_gpus,
            clocks=self.clocks,
            allow_changed_training=self.allow_changed_training,
        )
        if isinstance(job, ScriptJob) and len(problem.candidates) < 2 and before is None:
            raise self._nothing_to_try(job)
        if not problem.length_known:
            self.constraints.require_limits_of_a_step()
        if self.simulated:
            problem = _as_prediction(problem)
            # It would repeat the prediction.
            request = replace(self, search=replace(self.search, verify=False))
        run = RunFolder.named(self.runs_dir, name or new_name(problem.name, self.runs_dir))
        return problem, run, request

    def _on_ray(self, notify: Notify | None) -> Cluster:
        from tuner.executors.ray_cluster import survey
        from tuner.problem.from_job import cluster_of
        from tuner.problem.study_file import parse_cluster

        if self.ray_address is None:
            raise InputError("device_kind chooses among the nodes of a Ray cluster; name that too")
        if self.executor not in (None, "ray"):
            raise InputError(
                f"a Ray cluster runs probes by the executor ray, not {self.executor!r}"
            )
        if self.cluster != "auto":
            named = cluster_of(self.cluster)
            if self.device_kind not in (None, named.device.name):
                raise InputError(
                    f"device_kind is {self.device_kind!r}, and cluster {named.name!r} is of "
                    f"{named.device.name}"
                )
            return named
        say = _saying(notify)
        seen = survey(self.ray_address, device_kind=self.device_kind, say=say)
        if seen.cluster is None:
            reasons = "; ".join(seen.sentences()) or "it has none"
            raise InputError(
                f"no node of the Ray cluster at {self.ray_address!r} can be used: {reasons}"
            )
        for sentence in seen.sentences():
            say(sentence)
        run = RunFolder.named(self.runs_dir, self.name) if self.name else None
        before = parse_cluster(run.read_study() or {}) if run is not None else None
        if before is not None and (before.name, before.devices_per_node) == (
            seen.cluster.name,
            seen.cluster.devices_per_node,
        ):
            return before  # nodes come and go, and the question stays
        return seen.cluster

    def _elsewhere(self, device: str) -> str:
        job, cluster = self.job, self.cluster
        name = cluster if isinstance(cluster, str) else cluster.name
        where = f"{name} has {device}, and this machine does not"
        if isinstance(job, Script):
            return (
                f"{where}: tune the script on a machine that has, or predict a job: tuner plan JOB "
                f"--cluster {shlex.quote(name)}"
            )
        words = ["tuner", "plan"]
        if job is not None:
            words.append(job.name if isinstance(job, TrainingJob) else str(job))
        words += ["--cluster", name, *(["--space", self.space] if self.space else [])]
        for item, declared in declared_options(Constraints):
            value = getattr(self.constraints, item.name)
            if value != item.default and not declared.keyword_only:
                text = f"{value:.12g}" if isinstance(value, float) else str(value)
                words += [f"--{(declared.flag or item.name).replace('_', '-')}", text]
        if isinstance(self.baseline, Configuration):
            words += ["--today", self.baseline.short]
        elif self.baseline is not None:
            words += ["--today", *self._baseline_words]
        return (
            f"{where}, so nothing can be measured here; predict every configuration with "
            f"`{shlex.join(words)}`, or add --executor simulated to try out a search on predictions"
        )

    def _nothing_to_try(self, job: ScriptJob) -> NothingToTry:
        from tuner.workload.scripts.knob_support import why_nothing

        given = self.job.command if isinstance(self.job, Script) else shlex.join(job.words)
        return NothingToTry(
            f"nothing to try: of the script {job.name!r} nothing can be turned here\n"
            + "".join(f"  {sentence}\n" for sentence in why_nothing(job))
            + "Give it something to turn, for example\n"
            + f"  tuner optimize --knob NAME=VALUE,VALUE -- {given} --option {{NAME=VALUE}}"
        )

    def _inspected(
        self, script: Script, run: RunFolder, notify: Notify | None
    ) -> tuple[ScriptJob, Cluster]:
        from tuner.problem.from_job import cluster_of
        from tuner.problem.user_script import job_of_script, launched_here

        cluster, address = cluster_of(self.cluster), self.ray_address
        here, launcher = cluster, script.launcher
        launcher = launcher if launcher and launcher.words else None
        say = _saying(notify)
        if address is None:
            if script.nodes not in (None, 1) and (launcher is None or launcher.nodes == 1):
                raise InputError(
                    f"nodes is {script.nodes}, and without a Ray cluster a script runs on this "
                    "machine alone; join one with --ray ADDRESS (docs/clusters.md)"
                )
            launches: Launches = lambda job: launched_here(job, here, run, say)  # noqa: E731
            return job_of_script(script, cluster, run, launches, say=say), cluster
        nodes = script.nodes or (launcher.nodes if launcher else cluster.nodes)
        if nodes > cluster.nodes:
            raise InputError(f"nodes is {nodes}, and the Ray cluster has {cluster.nodes} usable")
        launches = lambda job: _launched_on_ray(  # noqa: E731
            job, here, run, address, say
        )
        return job_of_script(script, cluster, run, launches, nodes=nodes, say=say), cluster


def _saying(notify: Notify | None) -> Callable[[str], None]:
    return lambda sentence: None if notify is None else notify(Progress("note", None, sentence))


@contextmanager
def _launched_on_ray(
    job: ScriptJob,
    cluster: Cluster,
    run: RunFolder,
    address: str,
    say: Callable[[str], None],
) -> Iterator[RunProbe]:
    from tuner.executors.ray_executor import RayExecutor

    open_executor = partial(RayExecutor, run_dir=run.path, address=address, say=say)
    executor = open_executor(job, cluster)

    def run_probe(of: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        nonlocal executor, job
        if of is not job:  # its agents have their job from the start
            executor.close()
            executor, job = open_executor(of, cluster), of
            executor.prepare()
        executor.submit(request)
        record = executor.wait()
        assert record is not None  # one is in flight
        return record

    try:
        executor.prepare()
        yield run_probe
    finally:
        executor.close()


def device_elsewhere(cluster: Cluster | str) -> str | None:
    """Return the cluster's kind of device if this machine has another kind, else None."""
    if cluster == "auto":
        return None
    from tuner.problem.from_job import cluster_of
    from tuner.workload.node.machine import detect_cluster

    wanted = cluster_of(cluster).device
    if wanted.type == "cpu":  # every machine has cores, whatever its GPUs do
        return None
    return None if wanted.name == detect_cluster().device.name else wanted.name


def _as_prediction(problem: Problem) -> Problem:
    from tuner.models.analytic.known_error import known_error_lines

    assert problem.cluster is not None
    known = [f"known error: {line}" for line in known_error_lines(problem.cluster.device)]
    return replace(problem, notes=(*known, *problem.notes), simulated=True)
