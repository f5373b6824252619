"""A user's script as the job of a study: looked at once, then searched like any other.

What `workload.inspection` saw is kept in study.toml with the job, so a study that goes on does not
start the script again to look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from search_spaces.cluster import Cluster
from search_spaces.errors import InputError
from search_spaces.space import Candidates, load_space
from tuner.asked import known_job
from tuner.runs import RunFolder
from workload.script import Script, ScriptJob

__all__ = ["job_of_script", "script_candidates"]


def job_of_script(
    script: Script,
    cluster: Cluster,
    run: RunFolder,
    say: Callable[[str], None] = lambda sentence: None,
) -> ScriptJob:
    """What the script trains and what can be turned on it; from the run, where it tells already.

    Raises:
        InputError: as `workload.inspection.inspect_script`.
    """
    from workload.agent import LocalRunner
    from workload.inspection import STEPS, blank_job, inspect_script

    before = known_job(run.read_asked() or {})
    here = str(Path(script.cwd).resolve())
    if (
        isinstance(before, ScriptJob)
        and (before.words, before.cwd) == (script.words, here)
        and before.devices == cluster.devices_per_node
    ):
        return replace(before, steps=script.steps or STEPS)
    blank = blank_job(script, cluster)
    with closing(LocalRunner(blank, cluster, run_dir=run.path, say=say)) as runner:
        return inspect_script(script, runner, cluster, say=say)


def script_candidates(job: ScriptJob, cluster: Cluster, space: str) -> Candidates:
    """Every configuration of a space that can be turned on this script.

    Raises:
        InputError: there is no such space, or none of it is valid for this script.
    """
    valid = job.narrowed(load_space(space)).candidates(job, cluster)
    able = [configuration for configuration in valid if not job.refused(configuration)]
    if not able:
        raise InputError(f"of space {space!r} nothing can be turned on the script {job.name!r}")
    return Candidates.from_configurations(able)
