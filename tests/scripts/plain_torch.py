"""A plain torch DDP script: no DeepSpeed, its own loader, accumulation and checkpoints."""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step = 0
while True:
    for _micro in range(args.accumulation):
        inputs = torch.randn(args.batch_size, 8)
        (model(inputs).square().mean() / args.accumulation).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    torch.save(model.state_dict(), args.out)
    print(f"optimizer step {step} of {args.batch_size} x {args.accumulation}", flush=True)
