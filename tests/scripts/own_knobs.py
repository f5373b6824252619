"""A plain torch DDP script with knobs that no tuner knows, one of them deliberately slow.

It takes its attention from the command, its precision from a YAML file, its number of prefetched
batches from the hook, and a pause from the environment.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

try:
    import joulefront_hook as hook
except ImportError:
    hook = None

parser = argparse.ArgumentParser()
parser.add_argument("--attn", choices=["naive", "fused"], default="naive")
parser.add_argument("--config")
args = parser.parse_args()
text = Path(args.config).read_text() if args.config else "model: {precision: fp32}"
config = yaml.safe_load(text)
prefetch = (hook.configuration() if hook else {}).get("prefetch", 2)
pause_ms = os.environ.get("GLOO_OWN_PAUSE_MS", "0")
print("knobs", args.attn, config["model"]["precision"], repr(prefetch), pause_ms, flush=True)

#: How often the attention reads the whole batch: the fused form does so once.
READS = {"naive": 12, "fused": 1}

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    inputs = torch.randn(192, 64)
    for _ in range(8 * READS[args.attn]):
        inputs = (inputs @ inputs.T @ inputs).softmax(0)
    time.sleep(int(pause_ms) / 1000)
    model(inputs[:4]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
