"""A plain torch DDP script with live knobs, whose slow settings are known.

`pause_ms` is a function of the script, which sleeps so long in each step, refuses 99, and is read
back.
"""

import time

import torch
from torch.nn.parallel import DistributedDataParallel

try:
    import joulefront_hook as hook
except ImportError:
    hook = None

pause_ms = 30


def set_pause(value: int) -> None:
    """Sleep this long in each step from here on."""
    global pause_ms
    if value == 99:
        raise ValueError("99 ms are too long")
    pause_ms = value
    print("pause", value, flush=True)


if hook:
    hook.live("pause_ms", set_pause, lambda: pause_ms)
    hook.live("unread", lambda value: None)

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
while True:
    inputs = torch.randn(192, 64)
    for _ in range(8):
        inputs = (inputs @ inputs.T @ inputs).softmax(0)
    time.sleep(pause_ms / 1000)
    model(inputs[:4]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
