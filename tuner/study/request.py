"""The request of a study: every argument of `tuner.optimize`, declared once.

`optimize`, `replay`, `plan`, a dry run and the command line share it; what it asks of the training
(`constraints`) and of the search (`search`) is kept in study.toml.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.executors.base import Executor
from tuner.executors.local import ThisNode
from tuner.formatting import percent
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.problem.job_request import Given, JobRequest, cluster_of
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, NothingToTry
from tuner.search_spaces.fields import option
from tuner.search_spaces.knob_declarations import Knob
from tuner.study.events import Notify, announcing
from tuner.workload.records.probe import Announce, ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_job import ScriptJob

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from tuner.problem.problem import Problem
    from tuner.search.planner import ProbePlanner
    from tuner.workload.scripts.inspection import RunProbe


class StudyOptions(LimitOptions, total=False):
    """Keyword arguments of `tuner.optimize`, and limits on the training job.

    The limits are `budget_kJ=40` or `budget="11kWh"`, `deadline_s` or `deadline="2h"`,
    `power_cap_W` or `power_cap="2kW"`, and `max_slowdown` (0.05 or "5%"), the share by which it may
    take longer than today.

    Attributes:
        cluster: a `Cluster`, a name or path, or "auto" (the default) for the machine this runs on.
        space: the search space's name or path. If not given, an existing run keeps its own; a new
            one searches "experts", which has tensor, pipeline and expert parallelism, for a mixture
            of experts; "large", without the last, on several nodes or if the training states do not
            fit one device; else "default".
        constraints: every limit on the training job, and the objective.
        search: limits of the *search*, its seed, and how long it measures. A search ends when what
            is left to find would not repay the next probe over the training. Without any limit it
            also makes at most 40 probes, and uses at most 1 % of the training's energy once 8
            launch settings are measured.
        baseline: what the user runs today: a `Configuration`, its short name ("dp8 mb4 zero1"), or
            the path of a DeepSpeed JSON and knobs as a list; a plain data-parallel configuration if
            not given.
        plan: the run of a plan (`plan`) whose most informative configurations are probed first.
        try_first: configurations, or their names, that are probed first, in this order.
        clocks: search clocks and power limits, too, where they can be set (default: True).
        knobs: knobs of your own: `tuner.Knob`, declarations such as "compile=false,true", names of
            packs such as "nccl", or files of them (docs/knobs.md).
        allow_changed_training: search also knobs that change what is learnt (default: False).
        sampler: any Optuna sampler for two objectives, instead of joulefront's own search
            (docs/search.md).
        executor: "ray", "inline", "simulated" or an `Executor`. If not given: Ray on
            several nodes, at an address, in a Ray that the program has joined, or on a part of this
            node's GPUs; else inline. "simulated" answers probes by predictions and measures
            nothing; `plan` predicts every configuration of a cluster that is not here.
        ray_address: a Ray cluster to run on: "auto" or HOST:PORT (docs/clusters.md). With cluster
            "auto" its nodes are inspected, and the job may use all usable ones of one kind.
        device_kind: the kind of device to use there; the most frequent one if not given.
        meter: a meter of your own on every node that probes: "MODULE:CLASS", or an entry point of
            the group "joulefront.meters" (docs/your-meter.md). It is not saved with the run.
        storage: URL of the study's database; a journal in the run folder if not given.
        name: name of the run. An existing run is continued.
        runs_dir: folder of the run folders (default: "runs").
        report: write report.html and the launch files at the end (default: True).
        progress: show the search on standard error, in place at a terminal and as one line in a
            notebook (default: True).
        on_progress: called with each `Progress`.
    """

    cluster: Cluster | str
    space: str | None
    constraints: Constraints | None
    search: SearchSettings | None
    baseline: Given
    plan: str | Path | None
    try_first: Sequence[str | Configuration]
    clocks: bool
    knobs: Sequence[Knob | str]
    allow_changed_training: bool
    sampler: BaseSampler | ProbePlanner | None
    executor: str | Executor | None
    ray_address: str | None
    device_kind: str | None
    meter: str | None
    storage: str | None
    name: str | None
    runs_dir: str | Path
    report: bool
    progress: bool
    on_progress: Notify | None


@dataclass(frozen=True)
class StudyRequest(JobRequest):
    """Arguments of `tuner.optimize`, as `StudyOptions` documents them."""

    search: SearchSettings = field(default_factory=SearchSettings)
    plan: str | Path | None = option(
        None, "begin with the probes that this plan names", metavar="RUN"
    )
    executor: str | Executor | None = option(
        None,
        "ray, inline or simulated, which answers probes by predictions (default: inline on one "
        "node, ray on a cluster)",
    )
    ray_address: str | None = option(
        None, "Ray cluster to run on: auto or HOST:PORT", flag="ray", metavar="ADDRESS"
    )
    device_kind: str | None = None
    meter: str | None = option(
        None,
        "meter of your own on every node: a class, or an entry point of joulefront.meters "
        "(docs/your-meter.md; default: NVML, RAPL or an estimate)",
        metavar="MODULE:CLASS",
    )
    sampler: BaseSampler | ProbePlanner | None = None
    try_first: Sequence[str | Configuration] = option(
        (),
        "probe this configuration first: 'dp8 mb4 zero1'; repeatable",
        flag="try",
        metavar="CONFIGURATION",
    )
    name: str | None = option(None, "name of the run; an existing run is continued")
    storage: str | None = None
    runs_dir: str | Path = "runs"

    def resolved(self, notify: Notify | None, *, starts: bool = True) -> StudyRequest:
        """Return the request with its knobs, and with the cluster and the executor that it means.

        Without `starts`, a Ray cluster is not asked to start a node.

        Raises:
            InputError: its parts contradict each other, or this machine has other devices than the
                cluster.
        """
        predicted = False
        if self.executor is not None:
            from tuner.executors.choose import check_executor, predicts

            check_executor(self.executor)
            predicted = predicts(self.executor)
        if self.meter is not None and predicted:
            raise InputError(
                f"executor {self.executor} measures nothing; leave the meter {self.meter!r} out"
            )
        if self.knobs:
            return self.declaring_knobs().resolved(notify, starts=starts)
        cluster, executor = self.cluster, self.executor
        if self.ray_address is not None or self.device_kind is not None:
            cluster, executor = self._on_cluster(notify, starts), "ray"
        if executor is None and (device := device_elsewhere(cluster)) is not None:
            raise InputError(self._elsewhere(device))
        if self.script is not None:
            if predicted:
                raise InputError("a script is really run, not simulated; choose another executor")
            if self.ray_address is None:
                from tuner.workload.scripts.inspection import require_one_node

                require_one_node(self.script)
        search = self.search.with_default_limits(simulated=predicted)
        return replace(self, cluster=cluster, executor=executor, search=search, predicted=predicted)

    def inspected_problem(
        self, notify: Notify | None, node: ThisNode | None = None
    ) -> tuple[Problem, RunFolder, StudyRequest]:
        """Return the problem, the run folder and the request; a script is started once, on `node`
        if that is given."""
        from tuner.workload.scripts.inspection import announce_today
        from tuner.workload.scripts.script_job import with_threads

        request, name, script = self, self.name, self.script
        inspected: ScriptJob | None = None
        if script is not None:
            name = name or new_name(script.name, self.runs_dir)
            script, cluster = script.stating(self.baseline_words), cluster_of(self.cluster)
            run = RunFolder.named(self.runs_dir, name)
            announce = announcing(notify)
            inspected = job_of_script(
                script,
                cluster,
                run,
                address=self.ray_address,
                announce=announce,
                node=node,
                limit_s=self.search.first_step_limit_s,
                require_length=self.constraints.require_limits_of_a_step,
                adds_knobs=self.space is None,
            )
            request = replace(self, job=inspected, script=None, cluster=cluster)
        # Not before: a command that fails at once is told of at once.
        from tuner.problem.from_job import problem_of_job
        from tuner.problem.problem import Recording
        from tuner.problem.study_spec import parse_space

        before = RunFolder.named(self.runs_dir, name).read_study() if name else None
        if self.space is None and before is not None and Recording.of(before) is None:
            request = replace(request, space=parse_space(before))
        problem = problem_of_job(request)
        threads = False
        if inspected is not None and before is None and not _splits(problem, inspected):
            if (threaded := with_threads(inspected, cluster)) is not None:
                threads = True
                request = replace(request, job=threaded)
                problem = problem_of_job(request)
            elif len(problem.candidates) < 2:
                raise _nothing_to_try(inspected, script.command if script else "")
        if inspected is not None and before is None:
            for sentence in _why_batch_stays(inspected, request, threads=threads):
                announce(sentence)
        if inspected is not None and isinstance(problem.job, ScriptJob):
            told = inspected.without_torch_knobs  # those of torch are told with the others
            announce_today(problem.job, announce, problem.baseline, before=told)
        if problem.length is None:
            self.constraints.require_limits_of_a_step()
        if self.predicted:
            problem = _as_prediction(problem)
            # It would repeat the prediction.
            request = replace(request, search=replace(self.search, verify=False))
        run = RunFolder.named(self.runs_dir, name or new_name(problem.name, self.runs_dir))
        return problem, run, request

    def _on_cluster(self, notify: Notify | None, starts: bool) -> Cluster:
        from tuner.executors.choose import kind_named
        from tuner.problem.study_spec import parse_cluster

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
        announce = announcing(notify)
        seen = kind_named("ray").survey(
            self.ray_address, device_kind=self.device_kind, starts=starts, announce=announce
        )
        if seen.cluster is None:
            reasons = "; ".join(seen.sentences()) or "it has none"
            raise InputError(
                f"no node of the Ray cluster at {self.ray_address!r} can be used: {reasons}"
            )
        for sentence in seen.sentences():
            announce(sentence)
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
        if self.script is not None:
            return (
                f"{where}: tune the script on a machine that has, or predict a job: tuner plan JOB "
                f"--cluster {shlex.quote(name)}"
            )
        words = ["tuner", "plan"]
        if job is not None:
            words.append(str(job) if isinstance(job, str | Path) else self.named_job.name)
        words += ["--cluster", name]
        return (
            f"{where}, so nothing can be measured here; predict every configuration with "
            f"`{shlex.join(words)}` and your limits, or add --executor simulated to try out a "
            "search on predictions"
        )


def device_elsewhere(cluster: Cluster | str) -> str | None:
    """Return the cluster's kind of device if this machine has another kind, else None."""
    if cluster == "auto":
        return None
    from tuner.workload.node.platforms import detect_cluster

    wanted = cluster_of(cluster).device
    if not wanted.is_gpu:  # every machine has cores, whatever its GPUs do
        return None
    return None if wanted.name == detect_cluster().device.name else wanted.name


def _as_prediction(problem: Problem) -> Problem:
    from tuner.models.prior import error_lines

    assert problem.cluster is not None
    errors = [f"known error: {line}" for line in error_lines(problem.cluster.device)]
    return replace(problem, notes=(*errors, *problem.notes), predicts=True)


@dataclass(frozen=True)
class _Look:
    """What every launch of a first look at a script is told.

    Attributes:
        adds_knobs: knobs of torch that may matter are added to those of the job.
    """

    cluster: Cluster
    run: RunFolder
    announce: Announce
    adds_knobs: bool


def job_of_script(
    script: Script,
    cluster: Cluster,
    run: RunFolder,
    *,
    address: str | None,
    announce: Announce,
    node: ThisNode | None = None,
    limit_s: float | None = None,
    require_length: Callable[[], None] = lambda: None,
    adds_knobs: bool = False,
) -> ScriptJob:
    """Return the job that a script trains; from the run folder if it was inspected before.

    What `tuner.workload.scripts.inspection` saw is kept in study.toml with the job. Without the
    `address` of a Ray cluster this machine (`node`, which the caller closes) starts it, and waits
    `limit_s` for its first step. `require_length` is called if one look has shown no length of the
    training: no limit may be on the whole of it. With `adds_knobs`, knobs of torch that may matter
    are added.
    """
    from tuner.workload.scripts.inspection import announce_endless

    with ExitStack() as ends:
        here = node or ends.enter_context(closing(ThisNode()))
        launched_here = partial(
            _launched_here, node=here, cluster=cluster, run=run, announce=announce, limit_s=limit_s
        )
        before, look = _job_before(run), _Look(cluster, run, announce, adds_knobs)
        if before is None:
            announce_endless(script, announce)
        if address is None and script.observable and (before is None or before.line):
            job = _observed_here(script, before, launched_here, require_length, look)
            if job is not None:
                return job
        return _inspected(script, before, launched_here, address, look)


def _job_before(run: RunFolder) -> ScriptJob | None:
    if (study := run.read_study()) is None:
        return None
    from tuner.problem.study_spec import parse_script

    return parse_script(study)


def _observed_here(
    script: Script,
    before: ScriptJob | None,
    launched_here: Callable[..., RunProbe],
    require_length: Callable[[], None],
    look: _Look,
) -> ScriptJob | None:
    """Return the job of a command that is started as it stands; None if it has to be inspected."""
    from tuner.workload.scripts.inspection import announce_today, blank_job
    from tuner.workload.scripts.observing import job_of_observed, job_to_observe, observe_script

    script.require_startable()
    if before is not None and (again := before.observed_again(script)) is not None:
        announce_today(again.without_torch_knobs, look.announce)
        return again
    run_probe = launched_here(job_to_observe(script), ahead=script.probable_imports)
    seen = observe_script(
        script, run_probe, folder=look.run.path, announce=look.announce, cluster=look.cluster
    )
    if seen is None:
        return None
    blank = blank_job(seen.script, look.cluster)
    if not (blank.steps or seen.facts.get("length")):
        require_length()
    with _importing("tuner.study.session"):
        return job_of_observed(
            seen,
            launched_here(replace(blank, as_it_stands=bool(seen.why_as_it_stands))),
            cluster=look.cluster,
            folder=look.run.path,
            announce=look.announce,
            adds_knobs=look.adds_knobs,
        )


@contextmanager
def _importing(module: str) -> Iterator[None]:
    # Import what comes next while processes are waited for inside.
    thread = threading.Thread(target=partial(import_module, module), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _inspected(
    script: Script,
    before: ScriptJob | None,
    launched_here: Callable[[ScriptJob], RunProbe],
    address: str | None,
    look: _Look,
) -> ScriptJob:
    """Return the job of a script whose ranks are started one by one, here or on a Ray cluster."""
    from tuner.workload.scripts.inspection import (
        announce_today,
        blank_job,
        inspect_script,
        launcher_on,
        ranks_today,
    )

    nodes = _nodes(script, look.cluster, address)
    if before is not None:
        ranks = nodes * ranks_today(script, look.cluster, nodes)
        again = before.inspected_again(script, ranks, launcher_on(script, look.cluster))
        if again is not None:
            announce_today(again.without_torch_knobs, look.announce)
            return again
    blank = blank_job(script, look.cluster, nodes)
    inspect = partial(
        inspect_script,
        script,
        blank,
        cluster=look.cluster,
        folder=look.run.path,
        announce=look.announce,
        adds_knobs=look.adds_knobs,
    )
    if address is None:
        return inspect(launched_here(blank))
    with _launched_on_cluster(blank, look.cluster, look.run, look.announce, address) as run_probe:
        return inspect(run_probe)


def _nodes(script: Script, cluster: Cluster, address: str | None) -> int:
    launcher = script.launcher if script.launcher and script.launcher.words else None
    if address is None:
        if script.nodes not in (None, 1) and (launcher is None or launcher.nodes == 1):
            raise InputError(
                f"nodes is {script.nodes}, and without a Ray cluster a script runs on this "
                "machine alone; join one with --ray ADDRESS (docs/clusters.md)"
            )
        return 1
    nodes = script.nodes or (launcher.nodes if launcher else cluster.nodes)
    if nodes > cluster.nodes:
        raise InputError(f"nodes is {nodes}, and the Ray cluster has {cluster.nodes} usable")
    return nodes


def _launched_here(
    imports_of: ScriptJob,
    node: ThisNode,
    run: RunFolder,
    cluster: Cluster,
    announce: Announce,
    limit_s: float | None,
    *,
    ahead: Sequence[str] | None = None,
) -> RunProbe:
    # Launches of a first look have jobs that differ; what the ranks of `imports_of` import is
    # imported once for all of them, and what they will probably need (`ahead`) while a core is idle
    # beside a command.
    def run_probe(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        runner = node.runner(imports_of, cluster, run_dir=run.path, announce=announce)
        if limit_s is not None:
            request = replace(request, first_step_limit_s=limit_s, time_limit_s=limit_s)
        runner.prepare()
        if ahead is not None:
            runner.import_ahead(ahead)
        return runner.run_for_job(job, request)

    return run_probe


@contextmanager
def _launched_on_cluster(
    job: ScriptJob, cluster: Cluster, run: RunFolder, announce: Announce, address: str
) -> Iterator[RunProbe]:
    from tuner.executors.base import Opening
    from tuner.executors.choose import open_executor

    def opened(of: ScriptJob) -> Executor:
        return open_executor("ray", Opening(of, cluster, run.path, announce, address))

    executor = opened(job)

    def run_probe(of: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        nonlocal executor, job
        if of is not job:  # its agents have their job from the start
            executor.close()
            executor, job = opened(of), of
        executor.submit(request)
        record = executor.wait()
        assert record is not None  # one is in flight
        return record

    try:
        yield run_probe
    finally:
        executor.close()


def _splits(problem: Problem, job: ScriptJob) -> bool:
    # Return True if more is varied than what can be set in any program of torch.
    added = {knob.name for knob in job.knobs if knob.target[0] == "torch"}
    launches, lives = problem.candidates.launches, problem.candidates.lives
    others = {tuple(part for part in each.items() if part[0] not in added) for each in launches}
    return len(others) > 1 or any(len(each) > 1 for each in lives)


def _opened_by_an_edit(job: ScriptJob, request: StudyRequest) -> list[str]:
    """Return what an edit would open of a script whose micro-batch is fixed, and its worth.

    At most one sentence. The worth is what the models expect, if they know the job.
    """
    frame, offer = job.frame, job.offers["micro_batch"]
    fixed = frame.counted and frame.micro_batch > 1 and frame.accumulation == 1
    left = frame.micro_batch_stays or frame.unproven or frame.owner or job.driver is not None
    if offer.turned or left or not (fixed and job.global_batch):
        return []
    lines = "four lines of accumulation (docs/your-script.md#accumulation)"
    if "micro_batch" in job.placeholders:
        text = (
            f"its micro-batch of {frame.micro_batch} can be set, and nothing accumulates: {lines} "
            "would let others be searched"
        )
    else:
        name = f"{{micro_batch={frame.micro_batch}}}"
        text = (
            f"no argument was found that sets its micro-batch of {frame.micro_batch} ({name} in "
            f"the command names one): with one and {lines} others would be searched"
        )
    expected = _expected_of_splits(job, request) if job.model and job.sequence_length else ""
    return [f"{text}; {expected}" if expected else text]


def _expected_of_splits(job: ScriptJob, request: StudyRequest) -> str:
    """Return the most that the models expect of other micro-batches than today's; "" if unknown."""
    from tuner.answer.judge import WORTH
    from tuner.problem.from_job import problem_of_job

    reads = (*job.frame.reads, "micro_batch", "gradient_accumulation")
    opened = replace(job, frame=replace(job.frame, reads=reads))
    problem = problem_of_job(replace(request, job=opened))
    today = problem.baseline
    splits = [c for c in problem.candidates if c.get("micro_batch") != today.get("micro_batch")]
    if problem.prior is None or not splits:
        return ""
    expected = problem.prior.predict([today, *splits])
    time_s, power_W = expected.step_time_s, expected.power_W
    figures = {"energy": time_s * power_W, "time": time_s}
    saved = {name: 1 - float(each[1:].min() / each[0]) for name, each in figures.items()}
    worth = [
        f"up to {percent(share)} less {name}" for name, share in saved.items() if share > WORTH
    ]
    return f"the models expect {' and '.join(worth) or 'no gain of them, but less memory'}"


def _why_batch_stays(job: ScriptJob, request: StudyRequest, *, threads: bool) -> list[str]:
    """Return why a script's batch is not searched, in at most one sentence without its stop.

    Args:
        threads: the threads of a rank are searched instead; without them only what an edit would
            open is worth a sentence.
    """
    opened = _opened_by_an_edit(job, request)
    if not threads:
        return opened
    offer = job.offers["micro_batch"]
    if opened:
        why = opened[0]
    elif offer.turned:
        why = f"its batch of {job.global_batch} can be split no other way here"
    else:  # of arguments that were not proven, it names them and says that they are left
        why = offer.why if job.frame.unproven else f"its batch stays as it is: {offer.why}"
    return [f"{why}; the threads of a rank are searched{', too' if job.knobs else ''}"]


def _nothing_to_try(job: ScriptJob, command: str) -> NothingToTry:
    """Return the error that explains why no knob of a script can be set, with the remedy."""
    return NothingToTry(
        f"nothing to try: of the script {job.name!r} nothing can be turned here\n"
        + "".join(f"  {sentence}\n" for sentence in job.why_nothing())
        + f"What it uses as it is: tuner run -- {command or shlex.join(job.words)}\n"
        + "An argument of the script that may change is a knob: --knob NAME=VALUE,VALUE with "
        + "{NAME=VALUE} in the command (docs/your-script.md)"
    )
