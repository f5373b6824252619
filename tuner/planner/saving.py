"""Memory of the host that saving a model takes beside training."""

from __future__ import annotations

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of


def saving_bytes(job: TrainingJob, cluster: Cluster, configuration: Configuration) -> float:
    """Return the bytes that a whole model takes on the first rank's host while it is saved.

    Sharded parameters are gathered there: in 16 bits under ZeRO-3 (DeepSpeed 0.19.8, engine.py,
    _zero3_consolidated_16bit_state_dict), in fp32 under FSDP (torch's FULL_STATE_DICT). 0 where
    each rank holds them, with adapters, and where device and host are one memory.
    """
    by_torch = configuration.get("sharding") != "deepspeed"
    if job.lora or not cluster.device.is_gpu or not (by_torch or configuration.zero_stage == 3):
        return 0.0
    return facts_of(job).parameters * (4.0 if by_torch or job.precision == "fp32" else 2.0)
