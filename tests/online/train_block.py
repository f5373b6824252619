"""A small training in a block of `tuner.tuning`: STEPS, and seconds to sleep each; prints JSON."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import tuner
from tuner.online.command import tuning_json

steps, nap_s = int(sys.argv[1]), float(sys.argv[2])
options = json.loads(os.environ.get("OPTIONS", '{"max_slowdown": "8%"}'))
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
if ranks > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for count in (steps, 30):  # one block after the other
    seen: list[dict[str, float]] = []
    with tuner.tuning(**options) as run:
        for _step in range(count):
            x = torch.randn(16, 32)
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(nap_s)
            if run.metrics and (not seen or seen[-1] != run.metrics):
                seen.append(run.metrics)
    if run.outcome is not None:
        outcome = tuning_json(run.outcome)
        print(json.dumps({"loss": loss.item(), "seen": seen, **outcome}, default=list), flush=True)
if ranks > 1:
    dist.destroy_process_group()
