"""Configurations that use all GPUs of a predicted cluster larger than the probed one."""

from __future__ import annotations

from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import unrunnable
from tuner.search_spaces.space import SearchSpace


def target_candidates(
    job: TrainingJob, big: Cluster, space: SearchSpace, gpus: int, *, plan: bool = False
) -> Candidates:
    """Return the configurations of a space that use this number of GPUs of a cluster.

    Args:
        plan: keep what the built-in training program cannot run yet.

    Raises:
        InputError: there is none, or nothing is known that would predict.
    """
    if not job.is_modelled:
        raise InputError(
            "a prediction for more GPUs needs the job's model and sequence length, which are not "
            f"known for {job.name!r}"
        )
    valid = space.candidates(job, big)
    kept = [
        each
        for each in valid.configurations
        if each.world_size == gpus and (plan or not unrunnable(each, job))
    ]
    if not kept:
        largest = max(each.world_size for each in valid.configurations)
        raise InputError(
            f"space {space.name!r} has no configuration of job {job.name!r} on {gpus} GPUs (the "
            f"most that one uses is {largest}); a larger global batch than {job.global_batch} "
            "feeds more"
        )
    return Candidates.from_configurations(kept)
