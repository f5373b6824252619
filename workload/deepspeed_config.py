"""A configuration rendered to what really starts a training run: DeepSpeed JSON and arguments.

Nothing else differs between two probes: what is not derived from the configuration is derived from
the job. `train_batch_size` is always the job's global batch, so DeepSpeed itself refuses a
micro-batch and accumulation that do not multiply to it.
"""

from __future__ import annotations

from typing import Any

from search_spaces.configuration import Configuration
from search_spaces.job import TrainingJob

__all__ = ["render_deepspeed_config", "training_arguments"]


def render_deepspeed_config(configuration: Configuration, job: TrainingJob) -> dict[str, Any]:
    """The DeepSpeed JSON of one configuration.

    Keys are DeepSpeed 0.19's (deepspeed.ai/docs/config-json).

    Raises:
        InvalidValue: micro-batch x data parallelism does not divide the global batch.
    """
    offload = configuration.get("optimizer_offload")
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
                # torch's AdamW on the device; DeepSpeed's own would be compiled at the first start.
                # With the states on the host DeepSpeed insists on its CPU Adam.
                "torch_adam": offload == "none",
            },
        },
        "zero_optimization": {"stage": configuration.zero_stage},
    }
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    if offload == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return config


def training_arguments(configuration: Configuration) -> tuple[str, ...]:
    """Arguments of the built-in training program that change the model, not DeepSpeed."""
    mode = configuration.get("activation_checkpointing")
    return () if mode == "none" else ("--activation_checkpointing", str(mode))
