"""A script's DeepSpeed settings: the file that it names, and a configuration's changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.declared_knobs import deepspeed_settings
from tuner.workload.deepspeed_config import render_deepspeed_config
from tuner.workload.hook import merge
from tuner.workload.scripts.knob_support import OFFLOADS, OLD_OFFLOADS

if TYPE_CHECKING:
    from tuner.workload.scripts.script_job import ScriptJob

#: A JSON object with one of these is taken for a DeepSpeed configuration.
_DEEPSPEED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
)


def overlay(job: ScriptJob, configuration: Configuration) -> dict[str, Any]:
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


def _optimizer_on_host(job: ScriptJob) -> dict[str, Any]:
    optimizer = job.frame.config.get("optimizer") or {}
    if job.frame.client_optimizer or not optimizer:
        return {"zero_force_ds_cpu_optimizer": False}
    if (optimizer.get("params") or {}).get("torch_adam"):
        # The same update by DeepSpeed's kernel for the host, which it insists on.
        return {"optimizer": {"params": {"torch_adam": False}}}
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Return a DeepSpeed configuration; InputError if the file holds no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the DeepSpeed configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no JSON object, so it is no DeepSpeed configuration")
    return data


def is_deepspeed(path: Path) -> bool:
    """Return True if a JSON file looks like a DeepSpeed configuration."""
    try:
        data = read_json(path)
    except InputError:
        return False
    return any(key in data for key in _DEEPSPEED_KEYS)
