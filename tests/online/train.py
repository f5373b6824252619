"""A small training that prints its losses: STEPS, and seconds to sleep in each step."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

steps, nap_s = int(sys.argv[1]), float(sys.argv[2])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(steps):
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(nap_s)
    if rank == 0:
        print(step, repr(loss.item()), flush=True)
if world > 1:
    dist.destroy_process_group()
