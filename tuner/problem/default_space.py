"""The search space of a job when the user names none.

A run that exists keeps the space of its study.toml. A new one searches "default", in which every
rank holds the whole model, where that can be enough: one node, and training states that fit one
device. Otherwise it searches "large", which has tensor and pipeline parallelism, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of, job_state_bytes
from tuner.workload.scripts.script_job import ScriptJob

SMALL, LARGE = "default", "large"


def searched_space(space: str | None, job: TrainingJob, cluster: Cluster) -> tuple[str, str]:
    """Return the space that a job searches, and a sentence on its choice; "" if none is due."""
    if space is not None:
        return space, ""
    why = _why_large(job, cluster)
    if not why:
        return SMALL, ""
    without = f"--space {SMALL}: without tensor and pipeline parallelism"
    return LARGE, f"space {LARGE!r} is searched for {why} ({without})"


def _why_large(job: TrainingJob, cluster: Cluster) -> str:
    """Return why a job needs more than replicas on a cluster, as a phrase; "" if it does not.

    A script of the user's own never does: what it can turn is found by inspection.
    """
    if isinstance(job, ScriptJob) or not job.is_modelled:
        return ""
    if cluster.nodes > 1:
        return f"{cluster.nodes} nodes"
    parameters, memory = facts_of(job).parameters, cluster.device.memory_bytes
    states = job_state_bytes(job, 0, 1)
    if cluster.devices == 1 or cluster.device.type == "cpu" or not memory or states <= memory:
        return ""
    return f"{parameters / 1e9:.2g} billion parameters on {memory / 1e9:.0f} GB devices"


def space_of_run(study: Mapping[str, Any] | None) -> str | None:
    """Return the space that the study.toml of an existing run names; None for a new run."""
    section = (study or {}).get("space")
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) and "recorded" not in (study or {}) else None
