"""A DeepSpeed script as people write it: a config file, its own loader, its own optimizer."""

import argparse
import json

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=0, help="0: DeepSpeed's micro-batch")
parser.add_argument("--save", default="checkpoint")
parser.add_argument("--print-config", action="store_true")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
size = args.batch_size or engine.train_micro_batch_size_per_gpu()
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
if args.print_config and torch.distributed.get_rank() == 0:
    print("CONFIG", json.dumps(engine._config._param_dict), flush=True)
steps = 0
for _ in range(args.epochs):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary():
            steps += 1
            if steps == 2:
                engine.save_checkpoint(args.save)
                torch.save({"steps": steps}, f"{args.save}.pt")
            if steps == 3 and torch.distributed.get_rank() == 0:
                print("loss", float(loss), flush=True)
# Without both, an interpreter sometimes aborts at its end under live collectives (torch 2.13).
torch.distributed.barrier()
deepspeed.comm.destroy_process_group()
