"""A configuration's changes to a script's DeepSpeed settings."""

from __future__ import annotations

from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.workload.declared_knobs import deepspeed_settings
from tuner.workload.deepspeed_config import render_deepspeed_config
from tuner.workload.hook import merge
from tuner.workload.scripts.script_facts import OFFLOADS, OLD_OFFLOADS, ScriptFacts


def overlay(job: ScriptFacts, configuration: Configuration) -> dict[str, Any]:
    """Return a configuration's changes to the DeepSpeed settings (0.19); None removes a key.

    InvalidValue if micro-batch x data parallelism does not divide the global batch.
    """
    said: dict[str, Any] = {}
    if job.driver is not None and not job.frame.on_deepspeed:
        return deepspeed_settings(configuration, job.knobs)
    if job.accumulates and (job.sets_micro_batch or job.frame.micro_batch):
        said |= {
            "train_batch_size": job.global_batch,
            "train_micro_batch_size_per_gpu": configuration.micro_batch,
            "gradient_accumulation_steps": configuration.accumulation(job.global_batch),
        }
    if job.offers["zero_stage"].turned:
        stage = configuration.zero_stage
        said["zero_optimization"] = zero = {"stage": stage}
        if stage != 3:  # nowhere else does DeepSpeed take it
            zero["offload_param"] = None
        if stage and (job.frame.client_optimizer or "deepspeed_config" in job.placeholders):
            # The user's own optimizer is as exact under ZeRO as without it.
            said["zero_allow_untested_optimizer"] = True
    rendered = render_deepspeed_config(configuration, job)["zero_optimization"]
    for knob, section in OFFLOADS.items():
        if knob in job.offers and job.offers[knob].turned:
            zero = said.setdefault("zero_optimization", {})
            zero[section] = rendered.get(section)
            # DeepSpeed refuses the old spelling beside the new one.
            zero |= {name: None for name in OLD_OFFLOADS[section] if name in job.frame.zero}
    if (said.get("zero_optimization") or {}).get("offload_optimizer"):
        said |= _optimizer_on_host(job)
    return merge(said, deepspeed_settings(configuration, job.knobs))


def _optimizer_on_host(job: ScriptFacts) -> dict[str, Any]:
    optimizer = job.frame.config.get("optimizer") or {}
    if job.frame.client_optimizer or not optimizer:
        return {"zero_force_ds_cpu_optimizer": False}
    if (optimizer.get("params") or {}).get("torch_adam"):
        # The same update by DeepSpeed's kernel for the host, which it insists on.
        return {"optimizer": {"params": {"torch_adam": False}}}
    return {}
