"""Validity rules of linear layers: products in FP8, and LoRA's adapters."""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.rule import Rule, registering

_RULES: list[Rule] = []
_rule = registering(_RULES)

#: What the sides of a matrix must be multiples of: 16 bytes, of one byte a value
#: (torch._scaled_mm). A block of MX is 32 values, along the side that is summed over, and each side
#: is in one of a layer's three products.
_SIDES = {"tensorwise": 16, "rowwise": 16, "mx": 32}


@_rule(
    "FP8 needs tensor cores that multiply it: from compute capability 8.9 on, with the scales of "
    "MX from 10.0 on. A device's file states the rate (fp8_flops, mxfp8_flops).",
    "fp8",
)
def _fp8_device(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    scaling, device = str(c.get("fp8")), cluster.device
    if scaling == "none":
        return None
    if device.type != "cuda":
        return f"fp8 {scaling} needs a CUDA device, not {device.type}"
    if not device.flops_in_fp8(scaling):
        field = "mxfp8_flops" if scaling == "mx" else "fp8_flops"
        return f"fp8 {scaling} needs a device whose file states {field}; {device.name} has none"
    return None


@_rule("What is cast to FP8 is bf16: fp16 scales its loss for a range that FP8 lacks.", "fp8")
def _fp8_precision(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if c.get("fp8") != "none" and job.precision != "bf16":
        return f"fp8 {c.get('fp8')} takes a job in bf16, not in {job.precision}"
    return None


@_rule(
    "Scaled products take matrices whose sides are multiples of 16, of 32 with the blocks of MX.",
    "fp8",
    "micro_batch",
    "tensor_parallel",
    "sequence_parallel",
)
def _fp8_sides(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    scaling = str(c.get("fp8"))
    if scaling == "none" or not job.is_modelled:
        return None
    facts, multiple = facts_of(job), _SIDES[scaling]
    sides = {
        "tokens of a micro-batch": c.micro_batch * job.sequence_length // c.sequence_parallel,
        "hidden size": facts.hidden,
        "query width": facts.heads * facts.head_dim // c.tensor_parallel,
        "key and value width": facts.kv_heads * facts.head_dim // c.tensor_parallel,
        "intermediate size": facts.intermediate // c.tensor_parallel,
    }
    for name, side in sides.items():
        if side % multiple:
            return f"fp8 {scaling} needs a multiple of {multiple} as {name}, not {side}"
    return None


@_rule(
    "Adapters are whole on every rank that has their layer: neither the models nor the training "
    "program split them.",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
)
def _lora_degrees(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.lora is None:
        return None
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        degree = c.get(name)
        if degree != 1:
            return f"{name} {degree} does not train a job with LoRA"
    return None


@_rule(
    "The adapters' narrow products stay in the job's precision, and so do those beside them.", "fp8"
)
def _lora_precision(c: Configuration, job: TrainingJob, cluster: Cluster) -> str | None:
    if job.lora is not None and c.get("fp8") != "none":
        return f"fp8 {c.get('fp8')} does not train a job with LoRA"
    return None


PRODUCT_RULES: tuple[Rule, ...] = tuple(_RULES)
