"""Validity rules of pipeline schedules and virtual stages.

Conditions on the number of micro-batches are those of torch.distributed.pipelining (torch 2.13).
"""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.rule import Rule, registering

_RULES: list[Rule] = []
_rule = registering(_RULES)


def _virtual(c: Configuration) -> int:
    stages = c.get("virtual_stages")
    return stages if isinstance(stages, int) else 1


@_rule("Without a pipeline there is nothing to schedule.", "pipeline_schedule", "pipeline_parallel")
def _schedule_pipeline(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    schedule = c.get("pipeline_schedule")
    if schedule != "1f1b" and c.pipeline_parallel == 1:
        return f"pipeline_schedule {schedule} needs pipeline_parallel of at least 2"
    return None


@_rule(
    "1F1B has one part of the depth on each rank; with several it is the interleaved schedule.",
    "pipeline_schedule",
    "virtual_stages",
)
def _schedule_virtual_stages(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    schedule, stages = c.get("pipeline_schedule"), _virtual(c)
    if schedule == "1f1b" and stages > 1:
        return f"virtual_stages {stages} needs pipeline_schedule interleaved or zero_bubble"
    if schedule == "interleaved" and stages == 1:
        return "pipeline_schedule interleaved with virtual_stages 1 only repeats 1f1b"
    return None


@_rule("A virtual stage needs at least one layer.", "virtual_stages", "pipeline_parallel")
def _virtual_layers(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    stages, layers = _virtual(c), facts_of(job).layers
    parts = stages * c.pipeline_parallel
    if stages > 1 and parts > layers:
        return (
            f"virtual_stages {stages} x pipeline_parallel {c.pipeline_parallel} = {parts} exceeds "
            f"the model's {layers} layers"
        )
    return None


@_rule(
    "Interleaved schedules go in rounds of as many micro-batches as the pipeline has ranks, or "
    "more, all alike.",
    "pipeline_schedule",
    "pipeline_parallel",
    "data_parallel",
    "micro_batch",
    "global_batch",
)
def _schedule_rounds(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    chosen = c.get("global_batch")
    whole = chosen if isinstance(chosen, int) else job.global_batch
    count, left = divmod(whole, c.micro_batch * c.data_parallel)
    if c.get("pipeline_schedule") == "1f1b" or left:  # what is left is refused by another rule
        return None
    if not job.on_deepspeed:  # another framework may split a micro-batch for its pipeline
        return None
    rounds = max(1, count // c.pipeline_parallel)
    if count % rounds:
        return (
            f"pipeline_schedule {c.get('pipeline_schedule')} needs equal rounds: {count} "
            f"micro-batches are not divided by {rounds} rounds of pipeline_parallel "
            f"{c.pipeline_parallel}"
        )
    return None


#: The rules of this module, in the order in which they are written.
PIPELINE_RULES: tuple[Rule, ...] = tuple(_RULES)
