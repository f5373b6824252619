"""Validity rules of sharding by torch (FSDP2) in place of DeepSpeed's ZeRO."""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rule import Rule, registering

_RULES: list[Rule] = []
_rule = registering(_RULES)


def _by_torch(c: Configuration) -> bool:
    return c.get("sharding") != "deepspeed"


@_rule(
    "FSDP2 takes ZeRO's place, and one of the two shards the training state.",
    "sharding",
    "zero_stage",
)
def _sharding_stage(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if _by_torch(c) and c.zero_stage:
        return f"sharding {c.get('sharding')} takes zero_stage 0, not {c.zero_stage}"
    return None


@_rule(
    "Groups that each hold a whole copy of the training state are FSDP2's hybrid form (HSDP); "
    "ZeRO shards over all replicas.",
    "hsdp_replicas",
    "sharding",
)
def _hsdp_sharding(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("hsdp_replicas") != 1 and not _by_torch(c):
        return f"hsdp_replicas {c.get('hsdp_replicas')} needs sharding fsdp2"
    return None


@_rule(
    "Each group of HSDP has equally many ranks, two or more: over one there is nothing to shard.",
    "sharding",
    "hsdp_replicas",
    "data_parallel",
    "sequence_parallel",
)
def _hsdp_groups(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    groups, ranks = c.get("hsdp_replicas"), c.data_parallel
    if not _by_torch(c) or not isinstance(groups, int):
        return None
    if ranks % groups:
        return f"hsdp_replicas {groups} does not divide data_parallel {ranks}"
    # Other frameworks shard over one rank by default.
    if job.on_deepspeed and ranks // groups * c.sequence_parallel == 1:
        return (
            f"sharding {c.get('sharding')} has one rank to shard over: data_parallel {ranks} in "
            f"{groups} group{'s' if groups != 1 else ''}"
        )
    return None


@_rule(
    "The built-in training program does not spread experts over ranks under FSDP2.",
    "sharding",
    "expert_parallel",
)
def _sharding_experts(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.on_deepspeed and _by_torch(c) and c.expert_parallel > 1:
        return f"sharding {c.get('sharding')} takes expert_parallel 1, not {c.expert_parallel}"
    return None


@_rule("fp16 needs a scaled loss, which only DeepSpeed's engine has here.", "sharding")
def _sharding_precision(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.on_deepspeed and _by_torch(c) and job.precision == "fp16":
        return f"sharding {c.get('sharding')} takes precision bf16 or fp32, not fp16"
    return None


SHARDING_RULES: tuple[Rule, ...] = tuple(_RULES)
