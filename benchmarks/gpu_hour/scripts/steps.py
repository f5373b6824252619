"""A plain script that never waits for its GPU within a step, and writes its own step times."""

import itertools
import json
import os
import time

import torch

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
torch.manual_seed(0)
device, width, rows = ("cuda", 8192, 4096) if cuda else ("cpu", 64, 32)
layers = [torch.nn.Linear(width, width, bias=False) for _ in range(12)]
net = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=cuda)
batch = torch.randn(rows, width, device=device, dtype=torch.bfloat16)


class HostEvent:
    """What stands in for an event of CUDA on a core."""

    def __init__(self, enable_timing):
        self.at_s = 0.0

    def record(self):
        self.at_s = time.monotonic()

    def elapsed_time(self, other):
        return 1000 * (other.at_s - self.at_s)


Event = torch.cuda.Event if cuda else HostEvent
events = []
for step in range(100_000):
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    event = Event(enable_timing=True)
    event.record()
    events.append(event)
    if step % 50 == 49:
        if cuda:
            torch.cuda.synchronize()
        with open(os.environ["OWN_TIMES"], "a") as file:
            times_ms = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
            file.write(json.dumps(times_ms) + "\n")
        events = events[-1:]
