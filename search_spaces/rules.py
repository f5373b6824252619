"""Validity rules: conditions under which a configuration can train a job on a cluster.

Each rule is written once, with its reason and the knobs that it reads, so that the enumeration
(`tuner.search_spaces.space`) can apply it as soon as those are chosen. `RULES` refuses
configurations that cannot work anywhere or only repeat another one; those that work, but not in the
built-in training program, are found by `unrunnable`, so that planning, replay and recorded tables
may use them. Figures and quirks of DeepSpeed are those of release 0.19.8.
"""

from __future__ import annotations

import math
from functools import lru_cache

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.live_rules import LIVE_RULES
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.pipeline_rules import PIPELINE_RULES
from tuner.search_spaces.product_rules import PRODUCT_RULES
from tuner.search_spaces.rule import Rule, registering
from tuner.search_spaces.sharding_rules import SHARDING_RULES

_RULES: list[Rule] = []
_rule = registering(_RULES)


# Job and cluster alone.


@_rule("DeepSpeed refuses fp16 where the device has no fp16 arithmetic.")
def _precision(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.precision == "fp16" and cluster.device.type == "cpu":
        return "precision fp16 does not run on a CPU (use fp32 or bf16)"
    return None


@_rule("A table of learned positions has no entry for a longer sequence.")
def _positions(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    facts = facts_of(job)
    if facts.learned_positions and facts.positions and job.sequence_length > facts.positions:
        return (
            f"sequence_length {job.sequence_length} exceeds the {facts.positions} positions "
            f"of the {facts.model_type} model"
        )
    return None


# Degrees.


@_rule(
    "Every rank needs a device of its own.",
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
)
def _ranks_fit(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    need, have = c.world_size, cluster.devices
    if need > have:
        return (
            f"it needs {need} device{'s' if need != 1 else ''}, cluster {cluster.name!r} has {have}"
        )
    return None


@_rule(
    "The launcher starts equally many ranks on each node, and nodes are leased whole.",
    "data_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "sequence_parallel",
)
def _whole_nodes(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    need, node = c.world_size, cluster.devices_per_node
    if node < need <= cluster.devices and need % node:
        return f"{need} ranks do not fill whole nodes of {node} devices"
    return None


@_rule(
    "Another global batch changes what a step learns: it can be compared only if the job gives the "
    "number of steps to the solution.",
    "global_batch",
)
def _batch_known(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    chosen = c.get("global_batch")
    if isinstance(chosen, int) and job.steps_with(chosen) is None:
        legal = ", ".join(map(str, job.global_batches))
        return (
            f"job {job.name!r} does not give the number of steps at global_batch {chosen}, only at "
            f"{legal}; add a table steps_at or a noise_scale to its file"
        )
    return None


@_rule(
    "Micro-batches, accumulated over all replicas, are the global batch.",
    "data_parallel",
    "micro_batch",
    "global_batch",
)
def _global_batch(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    share, chosen = c.micro_batch * c.data_parallel, c.get("global_batch")
    whole = chosen if isinstance(chosen, int) else job.global_batch
    if whole % share:
        phrase = (
            f"micro_batch {c.micro_batch} x data_parallel {c.data_parallel} = {share} "
            f"does not divide the global batch {whole}"
        )
        if whole % c.data_parallel:
            return f"{phrase}, and data_parallel {c.data_parallel} alone does not either"
        near = _nearest_divisors(whole // c.data_parallel, c.micro_batch)
        return f"{phrase}; near it, micro_batch can be {' or '.join(map(str, near))}"
    return None


@lru_cache(maxsize=4096)  # asked for each combination of knobs of a space
def _nearest_divisors(number: int, value: int) -> tuple[int, ...]:
    """Return the greatest divisor of `number` below `value` and the least one above it."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    below, above = [n for n in divisors if n < value], [n for n in divisors if n > value]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


@_rule(
    "Tensor parallelism exchanges activations twice per layer, which is too slow between nodes.",
    "tensor_parallel",
)
def _tensor_in_node(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.tensor_parallel > cluster.devices_per_node:
        return (
            f"tensor_parallel {c.tensor_parallel} exceeds the {cluster.devices_per_node} "
            f"device{'s' if cluster.devices_per_node != 1 else ''} of a node"
        )
    return None


@_rule(
    "Tensor parallelism gives each rank whole heads, of queries and of keys and values.",
    "tensor_parallel",
)
def _tensor_heads(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    facts = facts_of(job)
    for count, what in ((facts.heads, "attention"), (facts.kv_heads, "key-value")):
        if count % c.tensor_parallel:
            return f"tensor_parallel {c.tensor_parallel} does not divide the {count} {what} heads"
    return None


@_rule("A pipeline stage needs at least one layer.", "pipeline_parallel")
def _pipeline_layers(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    layers = facts_of(job).layers
    if c.pipeline_parallel > layers:
        return f"pipeline_parallel {c.pipeline_parallel} exceeds the model's {layers} layers"
    return None


@_rule(
    "Ulysses gives each rank whole heads of what tensor parallelism left, and copies key-value "
    "heads only a whole number of times (deepspeed.runtime.sequence_parallel.ulysses_sp).",
    "sequence_parallel",
    "sequence_method",
    "tensor_parallel",
)
def _sequence_heads(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    facts, degree = facts_of(job), c.sequence_parallel
    if degree == 1 or c.get("sequence_method") != "ulysses":
        return None
    heads, kv = (max(1, n // c.tensor_parallel) for n in (facts.heads, facts.kv_heads))
    share = " left by tensor parallelism" if c.tensor_parallel > 1 else ""
    if heads % degree:
        return f"sequence_parallel {degree} does not divide the {heads} attention heads{share}"
    if kv % degree and degree % kv:
        return (
            f"sequence_parallel {degree} neither divides the {kv} key-value heads{share} "
            "nor is a multiple of them"
        )
    return None


@_rule("Each rank takes an equal part of every sequence.", "sequence_parallel")
def _sequence_length(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.sequence_length % c.sequence_parallel:
        return (
            f"sequence_parallel {c.sequence_parallel} does not divide "
            f"the sequence length {job.sequence_length}"
        )
    return None


@_rule(
    "One rank has nothing to gather; several take a chunk near the start of every sequence and one "
    "as near to its end, so that causal attention is the same work for all.",
    "sequence_method",
    "sequence_parallel",
)
def _sequence_chunks(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    method, degree = c.get("sequence_method"), c.sequence_parallel
    if method == "ulysses":
        return None
    if degree == 1:
        return f"sequence_method {method} needs sequence_parallel of at least 2"
    if job.sequence_length % (2 * degree):
        return (
            f"sequence_method {method} cuts sequences into 2 x {degree} chunks, which do not "
            f"divide the sequence length {job.sequence_length}"
        )
    return None


@_rule("Only experts can be spread, and each rank takes equally many.", "expert_parallel")
def _experts(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    facts, degree = facts_of(job), c.expert_parallel
    if degree > 1 and not facts.experts and (job.on_deepspeed or job.model):
        return f"expert_parallel {degree} needs a mixture-of-experts model; this one is dense"
    if degree > 1 and facts.experts % degree:
        return f"expert_parallel {degree} does not divide the {facts.experts} experts"
    return None


@_rule(
    "Expert groups are cut out of the data-parallel ranks.",
    "expert_parallel",
    "data_parallel",
    "sequence_parallel",
)
def _expert_groups(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    replicas = _replicas(c)
    if replicas % c.expert_parallel:
        return (
            f"expert_parallel {c.expert_parallel} does not divide data_parallel x "
            f"sequence_parallel = {replicas}"
        )
    return None


# ZeRO and offload.


def _replicas(c: Configuration) -> int:
    """Return the number of ranks that ZeRO shards over: data parallel and Ulysses ranks."""
    return int(c.data_parallel * c.sequence_parallel)


@_rule(
    "Over one rank there is nothing to shard: stages 1 to 3 repeat stage 0. DeepSpeed offers "
    "offload only from stage 1 (asynchronous or of parameters: stage 3) on, so with offload only "
    "that stage is allowed.",
    "zero_stage",
    "optimizer_offload",
    "parameter_offload",
    "data_parallel",
    "sequence_parallel",
)
def _zero_replicas(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if _replicas(c) > 1 or not job.on_deepspeed:  # other frameworks shard over one rank by default
        return None
    lowest = {"none": 0, "cpu": 1}.get(str(c.get("optimizer_offload")), 3)
    lowest = lowest if c.get("parameter_offload") == "none" else 3
    if c.zero_stage > lowest:
        return (
            f"zero_stage {c.zero_stage} over one replica only repeats zero_stage {lowest}: "
            "there is nothing to shard"
        )
    return None


@_rule("The pipeline engine asserts ZeRO below stage 2.", "zero_stage", "pipeline_parallel")
def _zero_pipeline(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.on_deepspeed and c.pipeline_parallel > 1 and c.zero_stage >= 2:
        return (
            f"pipeline_parallel {c.pipeline_parallel} takes zero_stage 0 or 1, not {c.zero_stage}"
        )
    return None


@_rule(
    "DeepSpeed documents tensor parallelism for ZeRO 0 to 2 only.", "zero_stage", "tensor_parallel"
)
def _zero_tensor(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.on_deepspeed and c.tensor_parallel > 1 and c.zero_stage == 3:
        return f"tensor_parallel {c.tensor_parallel} takes zero_stage 0 to 2, not 3"
    return None


@_rule(
    "DeepSpeed's MoE layer asserts out stage 3: its experts are sharded already.",
    "zero_stage",
    "expert_parallel",
)
def _zero_experts(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.on_deepspeed and c.expert_parallel > 1 and c.zero_stage == 3:
        return f"expert_parallel {c.expert_parallel} takes zero_stage 0 to 2, not 3"
    return None


@_rule(
    "Offload is an option of ZeRO's optimizer; stage 0 has none.", "optimizer_offload", "zero_stage"
)
def _offload_zero(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offload = c.get("optimizer_offload")
    if job.on_deepspeed and offload != "none" and c.zero_stage == 0:
        return f"optimizer_offload {offload} needs zero_stage 1 to 3, not 0"
    return None


@_rule(
    "SuperOffload, the asynchronous form that keeps the update exact, is written for CUDA.",
    "optimizer_offload",
)
def _async_device(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("optimizer_offload") == "async" and cluster.device.type != "cuda":
        return f"optimizer_offload async runs on CUDA devices only, not on {cluster.device.type}"
    return None


@_rule("SuperOffload replaces the optimizer of stage 3.", "optimizer_offload", "zero_stage")
def _async_stage(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    # Stage 0 is refused by `_offload_zero` for any offload.
    if c.get("optimizer_offload") == "async" and c.zero_stage in (1, 2):
        return f"optimizer_offload async needs zero_stage 3, not {c.zero_stage}"
    return None


@_rule(
    "Only ZeRO 3 gathers parameters for use, so only it can keep them elsewhere.",
    "parameter_offload",
    "zero_stage",
)
def _parameter_stage(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offload = c.get("parameter_offload")
    if job.on_deepspeed and offload != "none" and c.zero_stage != 3:
        return f"parameter_offload {offload} needs zero_stage 3, not {c.zero_stage}"
    return None


@_rule("One block in k cannot be recomputed if there are fewer than k.", "activation_checkpointing")
def _checkpointed_blocks(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    mode, layers = str(c.get("activation_checkpointing")), facts_of(job).layers
    if mode.startswith("every_") and int(mode.removeprefix("every_")) > layers:
        return f"activation_checkpointing {mode} needs as many layers, the model has {layers}"
    return None


@_rule(
    "DeepSpeed swaps to an NVMe drive only what ZeRO 3 has partitioned.",
    "optimizer_offload",
    "zero_stage",
)
def _nvme_stage(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    # Stage 0 is refused by `_offload_zero`.
    if c.get("optimizer_offload") == "nvme" and c.zero_stage in (1, 2):
        return f"optimizer_offload nvme needs zero_stage 3, not {c.zero_stage}"
    return None


@_rule("Offload to an NVMe drive needs a folder there.", "optimizer_offload", "parameter_offload")
def _nvme_path(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    for name in ("optimizer_offload", "parameter_offload"):
        if c.get(name) == "nvme" and not cluster.nvme_path:
            return (
                f"{name} nvme needs a folder on the node's own drive: nvme_path in the cluster's "
                "file, or JOULEFRONT_NVME_PATH for this machine"
            )
    return None


# Full checkpointing and activation offload can be combined: DeepSpeed's `cpu_checkpointing` moves
# the inputs that checkpointing keeps, one per layer (2 s b h bytes), which for long sequences fill
# the device. So no rule refuses the pair.


@_rule(
    "On a CPU the activations already live in host memory: offload would copy them and save "
    "nothing.",
    "activation_offload",
)
def _activation_device(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offload = c.get("activation_offload")
    if offload != "none" and cluster.device.type != "cuda":
        return f"activation_offload {offload} needs a CUDA device, not {cluster.device.type}"
    return None


@_rule(
    "What is kept by operator is not among the tensors that the offload moves.",
    "activation_checkpointing",
    "activation_offload",
)
def _selective_offload(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    offload = c.get("activation_offload")
    if c.get("activation_checkpointing") == "selective" and offload != "none":
        return f"activation_checkpointing selective takes activation_offload none, not {offload}"
    return None


#: All rules, in the order in which they are written.
RULES: tuple[Rule, ...] = (
    *_RULES,
    *SHARDING_RULES,
    *PIPELINE_RULES,
    *PRODUCT_RULES,
    *LIVE_RULES,
)


def broken_rules(configuration: Configuration, job: TrainingJob, cluster: Cluster) -> list[str]:
    """Return a phrase for each rule that refuses this configuration; empty if it can run.

    Raises:
        InputError: a degree is not an integer, or the job's model cannot be read.
    """
    phrases = (rule.broken(configuration, job, cluster) for rule in RULES)
    return [phrase for phrase in phrases if phrase is not None]
