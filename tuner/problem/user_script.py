"""A user's script as the job of a study: inspected once, then searched like any other.

What `tuner.workload.scripts.inspection` saw is kept in study.toml with the job, so a study that
continues does not start the script again to inspect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from tuner.problem.run_folder import RunFolder
from tuner.problem.study_file import parse_job
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates, SearchSpace
from tuner.workload.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_job import ScriptJob

RunProbe = Callable[[ScriptJob, ProbeRequest], ProbeRecord]
#: Makes what runs probes of a script's jobs, for as long as they are wanted.
Launches = Callable[[ScriptJob], AbstractContextManager[RunProbe]]


@contextmanager
def launched_here(
    job: ScriptJob, cluster: Cluster, run: RunFolder, say: Callable[[str], None]
) -> Iterator[RunProbe]:
    """Run probes on this machine."""
    from tuner.workload.node.runner import LocalRunner

    with closing(LocalRunner(job, cluster, run_dir=run.path, say=say)) as runner:
        runner.prepare()
        yield runner.run_of


def job_of_script(
    script: Script,
    cluster: Cluster,
    run: RunFolder,
    launches: Launches,
    *,
    nodes: int = 1,
    say: Callable[[str], None] = lambda sentence: None,
) -> ScriptJob:
    """Return the job that a script trains; from the run folder if it was inspected before."""
    from tuner.workload.scripts.inspection import (
        blank_job,
        inspect_script,
        launcher_on,
        ranks_today,
    )

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
    with launches(blank) as run_probe:
        return inspect_script(script, blank, run_probe, cluster=cluster, folder=run.path, say=say)


def _ways(job: ScriptJob) -> set[tuple[str, str]]:
    return {(knob.name, knob.how) for knob in job.knobs}


def script_candidates(job: ScriptJob, cluster: Cluster, space: SearchSpace) -> Candidates:
    """Return every configuration of a space that is valid for this script."""
    valid = job.narrowed(space).candidates(job, cluster)
    able = [configuration for configuration in valid if not job.refused(configuration)]
    if not able:
        raise InputError(
            f"of space {space.name!r} nothing can be turned on the script {job.name!r}"
        )
    return Candidates.from_configurations(able)
