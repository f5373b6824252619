"""A DeepSpeed training with ZeRO-2 that prints its losses: STEPS."""

import sys

import deepspeed
import torch
from torch import nn

deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
config = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
rank = torch.distributed.get_rank()
generator = torch.Generator().manual_seed(rank)
for step in range(int(sys.argv[1])):
    x = torch.randn(16, 32, generator=generator)
    loss = (engine(x) - x.sum(1, keepdim=True)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print("loss", step, repr(loss.item()), flush=True)
# Without both, an interpreter sometimes aborts at its end under live collectives (torch 2.13).
torch.distributed.barrier()
torch.distributed.destroy_process_group()
