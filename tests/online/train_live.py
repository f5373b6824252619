"""A small training with a live knob, `nap`: STEPS, and the seconds that each value sleeps.

"long" and "short" sleep as the words after STEPS say; a value that is neither is refused.
"""

import os
import sys
import time

import joulefront_hook as hook
import torch
import torch.distributed as dist
from torch import nn

words = [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]
steps, naps = int(words[0]), dict(zip(("long", "short"), map(float, words[1:]), strict=True))
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
chosen, step = ["long"], -1


def set_nap(value: str) -> None:
    """Use a value from the next step on."""
    naps[value]
    chosen[0] = value
    print(f"rank {rank} sleeps {value} after step {step}", file=sys.stderr, flush=True)


hook.live("nap", set_nap, lambda: chosen[0])
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
    time.sleep(naps[chosen[0]])
    optimizer.step()
    if rank == 0:
        print(step, repr(loss.item()), flush=True)
if world > 1:
    dist.destroy_process_group()
