"""A script that asks for its configuration where somebody tunes it, and runs as ever elsewhere.

Its steps are taken by hand, so it counts them itself.
"""

import torch

try:
    import joulefront_hook as hook
except ImportError:
    hook = None

configuration = hook.configuration() if hook else {}
checkpointing = configuration.get("activation_checkpointing", "none") != "none"
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
print("checkpointing", checkpointing, flush=True)
for _ in range(20 if hook is None or not configuration else 10**9):
    if hook:
        hook.phase("forward")
    inputs = torch.randn(4, 8, requires_grad=True)
    if checkpointing:
        out = torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False)
    else:
        out = block(inputs)
    out.square().mean().backward()
    with torch.no_grad():
        for weight in block.parameters():
            torch.distributed.all_reduce(weight.grad)
            weight -= 1e-3 * weight.grad
            weight.grad = None
    if hook:
        hook.step()
print("done", flush=True)
