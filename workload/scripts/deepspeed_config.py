"""Rendering of a configuration as DeepSpeed JSON, and the ops that it needs.

`train_batch_size` is the job's global batch, so DeepSpeed itself refuses a micro-batch and
accumulation that do not multiply to it.
"""

from __future__ import annotations

from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.workload.hook import merge
from tuner.workload.scripts.declared_knobs import deepspeed_settings


def render_deepspeed_config(
    configuration: Configuration, job: TrainingJob, *, nvme_path: str = "", on_cuda: bool = False
) -> dict[str, Any]:
    """Render the DeepSpeed JSON of one configuration (deepspeed.ai/docs/config-json, 0.19).

    On GPUs (`on_cuda`) torch's AdamW is one fused kernel, which needs no compiler, as DeepSpeed's
    FusedAdam does. InvalidValue if the replicas' micro-batches do not divide the global batch.
    """
    offload, job = configuration.get("optimizer_offload"), job.at(configuration)
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.accumulation(job.global_batch),
        "steps_per_print": 1_000_000_000,  # its own log line a step would be a print a step
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                # torch's defaults, said: DeepSpeed's CPU Adam decays no weights unless told to, and
                # offload would train another model.
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.01,
                # torch's AdamW on the device; DeepSpeed's own would be compiled at the first start.
                # With the states on the host DeepSpeed insists on its CPU Adam.
                "torch_adam": offload == "none",
            },
        },
        "zero_optimization": {"stage": configuration.zero_stage},
    }
    if on_cuda and offload == "none":
        config["optimizer"]["params"]["fused"] = True
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    zero = config["zero_optimization"]
    if offload != "none":
        zero["offload_optimizer"] = _kept_on("nvme" if offload == "nvme" else "cpu", nvme_path)
    if offload == "async":
        # SuperOffload; the share of the cores for Adam is the one its authors give.
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.8}
    if (near := configuration.get("zero_hpz_partition_size")) != 1:
        zero["zero_hpz_partition_size"] = near
    parameters = configuration.get("parameter_offload")
    if parameters != "none":
        zero["offload_param"] = _kept_on(str(parameters), nvme_path)
    if configuration.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": configuration.tensor_parallel}
        # DeepSpeed checks this against all ranks, tensor ranks included, before it splits them.
        del config["train_batch_size"]
    return merge(config, deepspeed_settings(configuration, job.knobs))


def _kept_on(device: str, nvme_path: str) -> dict[str, Any]:
    where = {"nvme_path": nvme_path} if device == "nvme" else {}
    return {"device": device, "pin_memory": True, **where}
