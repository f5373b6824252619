"""A pipeline over gloo that prints its losses: STEPS, then seconds of each stage's micro-batch.

The forward pass of a stage takes longer as the clock of its rank's GPU falls.
"""

import os
import sys
import time

import pynvml
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

steps, seconds = int(sys.argv[1]), [float(word) for word in sys.argv[2:]]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
top_MHz = 0
if os.environ.get("TIMED"):
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(rank)
    top_MHz = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if top_MHz:
            clock_MHz = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
            time.sleep(seconds[rank] * top_MHz / clock_MHz)
        return torch.tanh(self.linear(x))


torch.manual_seed(rank)
module = Stage()
stage = PipelineStage(module, rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)
for step in range(steps):
    x = torch.randn(16, 8, generator=generator)
    losses: list[torch.Tensor] = []
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    elif rank < world - 1:
        schedule.step()
    else:
        schedule.step(target=x.flip(1), losses=losses)
        print(step, repr(sum(losses).item()), flush=True)
    optimizer.step()
dist.destroy_process_group()
