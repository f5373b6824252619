"""Stands for Megatron-LM's pretrain_gpt.py: takes its flags and trains a small model on CPUs.

Tensor, pipeline and context parallelism are not there: each data-parallel group trains alone, and
ranks of one model repeat its work. Batches are split as Megatron splits them.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
    parser.add_argument(f"--{name}", type=int, default=1)
parser.add_argument("--context-parallel-size", type=int, default=1)
parser.add_argument("--expert-model-parallel-size", type=int, default=1)
parser.add_argument("--num-layers", type=int, required=True)
parser.add_argument("--hidden-size", type=int, required=True)
parser.add_argument("--num-attention-heads", type=int, required=True)
parser.add_argument("--seq-length", type=int, required=True)
parser.add_argument("--micro-batch-size", type=int, required=True)
parser.add_argument("--global-batch-size", type=int)
parser.add_argument("--train-iters", type=int, required=True)
parser.add_argument("--eval-iters", type=int, default=100)
parser.add_argument("--use-distributed-optimizer", action="store_true")
parser.add_argument("--optimizer-cpu-offload", action="store_true")
parser.add_argument("--overlap-grad-reduce", action="store_true")
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--recompute-granularity", choices=["full", "selective"])
parser.add_argument("--recompute-method", choices=["uniform", "block"])
parser.add_argument("--recompute-num-layers", type=int)
parser.add_argument("--save")
args = parser.parse_args()
print("flags", " ".join(sys.argv[1:]), flush=True)

dist.init_process_group("gloo")
inside = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
inside *= args.context_parallel_size
assert dist.get_world_size() % inside == 0, "world size is not divisible by the parallel sizes"
replicas = dist.get_world_size() // inside
whole = args.global_batch_size or args.micro_batch_size * replicas
assert whole % (args.micro_batch_size * replicas) == 0, "global batch size is not divisible"

model = torch.nn.Sequential(
    *(torch.nn.Linear(args.hidden_size, args.hidden_size) for _ in range(args.num_layers))
)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(args.train_iters):
    for _ in range(whole // (args.micro_batch_size * replicas)):
        # A micro-batch costs a fixed time beside its samples, as the start of kernels does.
        time.sleep(0.02)
        batch = torch.randn(args.micro_batch_size, args.seq_length, args.hidden_size)
        model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
