"""DeepSpeed finds the memory of a rank's own GPU, whatever number NVML gives it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.hook import engine
from tuner.workload.node.meters.gpus import cuda_numbering

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]


@pytest.mark.real
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({0: {"open_error": 4}, 1: {"open_error": 4}}, "0,1"),  # Slurm's job on the others
        ({1: {"lost": 1}}, "GPU-2,GPU-3"),
        ({}, "GPU-3,GPU-2"),
        ({0: {"lost": 1}}, None),
    ],
)
def test_deepspeed_asks_for_memory_whatever_numbers_the_gpus_have(
    twin_node: Make,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[int, dict[str, int]],
    named: str | None,
) -> None:
    """ZeRO 1 and 2 ask NVML at their start, by the number that CUDA has."""
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    node = twin_node(*(TwinGpu(uuid=f"GPU-{index}") for index in range(4)))
    for index, state in broken.items():
        node.set(index, **state)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    for name, value in cuda_numbering(os.environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    engine.allocate_cuda_memory(CUDA_Accelerator)
    assert CUDA_Accelerator().available_memory(0) == 7
