"""What a study predicts for more GPUs than it probes: the configurations that use all of them."""

from __future__ import annotations

from search_spaces.candidates import Candidates
from search_spaces.cluster import Cluster
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from search_spaces.rules import unrunnable
from search_spaces.space import load_space
from tuner.predict import enlarged

__all__ = ["target_candidates"]


def target_candidates(
    job: TrainingJob, cluster: Cluster, space: str, gpus: int, *, plan: bool = False
) -> Candidates:
    """The configurations of a space that use so many GPUs of this kind of cluster.

    Args:
        plan: keep what the built-in training program cannot run yet.

    Raises:
        InputError: there is none, or nothing is known that would predict.
    """
    if not job.model or not job.sequence_length:
        raise InputError(
            "target_gpus needs the job's model and sequence length, which are not known for "
            f"{job.name!r}"
        )
    big = enlarged(cluster, gpus)
    valid = load_space(space).candidates(job, big)
    kept = [
        each
        for each in valid.configurations
        if each.world_size == gpus and (plan or not unrunnable(each, job))
    ]
    if not kept:
        largest = max(each.world_size for each in valid.configurations)
        raise InputError(
            f"space {space!r} has no configuration of job {job.name!r} on {gpus} GPUs (the most "
            f"that one uses is {largest}); a larger global batch than {job.global_batch} feeds more"
        )
    return Candidates.from_configurations(kept)
