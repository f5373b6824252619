"""ray_train.json: the answer as Ray Train's TorchTrainer takes it.

The fields of `scaling_config` and `run_config` are arguments of `ray.train.ScalingConfig` and
`ray.train.RunConfig`; `train_loop_config` holds the values that the user's training function
applies. Ray is not imported: the files may be written where it is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.deploy.script_program import on_cores
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.scripts.job import launchable

#: Name of the file.
FILE = "ray_train.json"


def ray_train_json(
    configuration: Configuration,
    job: TrainingJob,
    cluster: Cluster | None,
    nodes: int,
    environment: Mapping[str, str],
    deepspeed: str,
) -> str:
    """Return the text of the file.

    Args:
        nodes: number of nodes that the ranks need, with the same number of ranks on each.
        environment: variables of the workers.
        deepspeed: DeepSpeed's settings as JSON; "" if it does not train the job.

    Raises:
        InputError: Ray cannot be told to place the workers as the ranks were measured.
    """
    workers, each = configuration.world_size, configuration.world_size // nodes
    if nodes > 1 and cluster is not None and each < cluster.devices_per_node:
        raise InputError(
            f"Ray Train fills one node after the other, and {configuration.short!r} has {each} "
            f"ranks on each of {nodes} nodes of {cluster.devices_per_node} devices; choose a "
            "--point that needs one node, or every device of its nodes"
        )
    scaling: dict[str, Any] = {
        "num_workers": workers,
        "use_gpu": not on_cores(cluster),
        "placement_strategy": "STRICT_PACK" if nodes == 1 else "PACK",
    }
    variables = dict(environment)
    if on_cores(cluster):
        # Ray gives a worker as many threads as CPUs, as the ranks of a probe have.
        threads = min(launchable(job, cluster).threads_today, cluster.devices_per_node // each)
        scaling["resources_per_worker"] = {"CPU": max(1, threads)}
        variables["DS_ACCELERATOR"] = "cpu"
    loop: dict[str, Any] = configuration.launch.to_json()
    share = configuration.micro_batch * configuration.data_parallel
    if "micro_batch" in loop and job.global_batch % share == 0:
        loop["gradient_accumulation"] = job.global_batch // share
    if deepspeed:
        loop["deepspeed"] = json.loads(deepspeed)
    answer = {
        "scaling_config": scaling,
        "run_config": {"worker_runtime_env": {"env_vars": variables}},
        "train_loop_config": loop,
    }
    return json.dumps(answer, indent=2) + "\n"
