"""Validity rules of jobs that train LoRA adapters."""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rule import Rule, registering

__all__ = ["LORA_RULES"]

_RULES: list[Rule] = []
_rule = registering(_RULES)


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


LORA_RULES: tuple[Rule, ...] = tuple(_RULES)
