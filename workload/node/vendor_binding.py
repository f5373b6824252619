"""Cores and memory of each rank, by the rules of torchrun and of DeepSpeed's launcher.

The fork server runs this file by path, as it has imported both. The functions of torch and
DeepSpeed that choose the cores are called; torch's, which would ask CUDA for the memory node of a
GPU, are told the nodes by NVML.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

#: Policies of set_mempolicy(2) by the option of numactl that asks for them.
POLICIES = {"-p": 1, "-m": 2}


def bind(rule: str, ranks: int, gpu_nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Return "cpus", "memory" (its nodes) and "policy" of each rank of this node.

    Rules are torchrun's "numa:MODE" and DeepSpeed's "cores:LIST", whose list may be empty.
    """
    kind, _, value = rule.partition(":")
    if kind == "numa":
        return _by_torch(value, ranks, gpu_nodes)
    return [_by_deepspeed(value, ranks, rank) for rank in range(ranks)]


def _by_torch(mode: str, ranks: int, gpu_nodes: Sequence[int]) -> list[dict[str, Any]]:
    from torch.numa import binding

    replaced = {
        "_get_numa_node_index_for_gpu_index": lambda *, gpu_index: gpu_nodes[gpu_index],
        "_get_gpu_count": lambda: len(gpu_nodes),
    }
    original = {name: getattr(binding, name) for name in replaced}
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    choose = functools.partial(binding._get_validated_logical_cpus_to_bind_to, numa_options=options)
    try:
        vars(binding).update(replaced)
        return [{"cpus": sorted(choose(gpu_index=rank))} for rank in range(ranks)]
    finally:
        vars(binding).update(original)


def _by_deepspeed(cores: str, ranks: int, rank: int) -> dict[str, Any]:
    from deepspeed.utils.numa import get_numactl_cmd, parse_range_list

    _, words = get_numactl_cmd(cores or None, ranks, rank)
    given = dict(zip(words[1::2], words[2::2], strict=True))
    found: dict[str, Any] = {"cpus": parse_range_list(given["-C"])}
    for option, policy in POLICIES.items():
        if option in given:
            found |= {"memory": parse_range_list(given[option]), "policy": policy}
    return found
