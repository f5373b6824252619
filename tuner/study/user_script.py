"""A user's script as the job of a study: inspected once, then searched like any other.

What `tuner.workload.scripts.inspection` saw is kept in study.toml with the job, so a study that
continues does not start the script again to inspect it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tuner.problem.run_folder import RunFolder
from tuner.problem.study_file import parse_job
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, NothingToTry
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.runners import CLUSTER
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import (
    blank_job,
    inspect_script,
    launcher_on,
    ranks_today,
)
from tuner.workload.scripts.script_job import ScriptJob

RunProbe = Callable[[ScriptJob, ProbeRequest], ProbeRecord]
Say = Callable[[str], None]


def job_of_script(
    script: Script, cluster: Cluster, run: RunFolder, *, address: str | None, say: Say
) -> ScriptJob:
    """Return the job that a script trains; from the run folder if it was inspected before.

    Args:
        address: of the Ray cluster that starts it; None starts it on this machine.
    """
    nodes = _nodes(script, cluster, address)
    before = parse_job(run.read_study() or {})
    here = str(Path(script.cwd).resolve())
    if (
        isinstance(before, ScriptJob)
        and (before.frame.given or before.words, before.cwd) == (script.words, here)
        and before.devices == nodes * ranks_today(script, cluster, nodes)
        and before.launcher == launcher_on(script, cluster)
        and before.driver == script.framework_of_command
        and _ways(before.declares(script.knobs)) == _ways(before)
    ):
        steps = script.steps or before.steps
        return replace(before.declares(script.knobs), steps=steps, secrets=script.secrets)
    blank = blank_job(script, cluster, nodes)
    if address is None:
        launched = _launched_here(blank, cluster, run, say)
    else:
        launched = _launched_on_cluster(blank, cluster, run, say, address)
    with launched as run_probe:
        return inspect_script(script, blank, run_probe, cluster=cluster, folder=run.path, say=say)


def _nodes(script: Script, cluster: Cluster, address: str | None) -> int:
    launcher = script.launcher if script.launcher and script.launcher.words else None
    if address is None:
        if script.nodes not in (None, 1) and (launcher is None or launcher.nodes == 1):
            raise InputError(
                f"nodes is {script.nodes}, and without a Ray cluster a script runs on this "
                f"machine alone; join one with --{CLUSTER} ADDRESS (docs/clusters.md)"
            )
        return 1
    nodes = script.nodes or (launcher.nodes if launcher else cluster.nodes)
    if nodes > cluster.nodes:
        raise InputError(f"nodes is {nodes}, and the Ray cluster has {cluster.nodes} usable")
    return nodes


def _ways(job: ScriptJob) -> set[tuple[str, str]]:
    return {(knob.name, knob.how) for knob in job.knobs}


@contextmanager
def _launched_here(
    job: ScriptJob, cluster: Cluster, run: RunFolder, say: Say
) -> Iterator[RunProbe]:
    from tuner.workload.node.runner import LocalRunner

    with closing(LocalRunner(job, cluster, run_dir=run.path, say=say)) as runner:
        runner.prepare()
        yield runner.run_of


@contextmanager
def _launched_on_cluster(
    job: ScriptJob, cluster: Cluster, run: RunFolder, say: Say, address: str
) -> Iterator[RunProbe]:
    from tuner.executors.choose import open_executor

    opened = partial(open_executor, CLUSTER, run_dir=run.path, say=say, address=address)
    executor = opened(job, cluster)

    def run_probe(of: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        nonlocal executor, job
        if of is not job:  # its agents have their job from the start
            executor.close()
            executor, job = opened(of, cluster), of
        executor.submit(request)
        record = executor.wait()
        assert record is not None  # one is in flight
        return record

    try:
        yield run_probe
    finally:
        executor.close()


def nothing_to_try(job: ScriptJob, command: str) -> NothingToTry:
    """Return the error that says why nothing can be turned on a script, and what to do."""
    from tuner.workload.scripts.knob_support import why_nothing

    return NothingToTry(
        f"nothing to try: of the script {job.name!r} nothing can be turned here\n"
        + "".join(f"  {sentence}\n" for sentence in why_nothing(job))
        + "Give it something to turn, for example\n"
        + f"  tuner optimize --knob NAME=VALUE,VALUE -- {command or shlex.join(job.words)} "
        + "--option {NAME=VALUE}"
    )
